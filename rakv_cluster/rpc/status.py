"""Errors of our tree as gRPC statuses with typed details, and back.

The details are google.rpc.Status with ErrorInfo (our code as reason), BadRequest (the field) and
RetryInfo, as AIP-193 has them: any client library reads them.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from rakv_cluster.errors import BodyTooLarge, RakvError, error_class

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "rakv"
_LONGEST_MESSAGE = 300
_TOO_LARGE = re.compile(r"(?<!CLIENT: )Received message larger than max \((\d+) vs\. (\d+)\)")
"""gRPC's own words, under the status of a full queue, before any code of ours sees the message."""


def status_code(error: RakvError) -> StatusCode:
    """The status that the error's class states."""
    return StatusCode[error.grpc_code]


def message_of(error: RakvError) -> str:
    """The error's message, cut where it is long: metadata of more than 8 KiB, in which it stands
    three times, would reach the client as another status."""
    if len(error.message) <= _LONGEST_MESSAGE:
        return error.message
    return error.message[: _LONGEST_MESSAGE - 1] + "\u2026"


def details_of(error: RakvError) -> bytes:
    """The value of :data:`DETAILS_KEY` in the trailing metadata."""
    message = message_of(error)
    parts: list[Message] = [ErrorInfo(reason=error.code.upper(), domain=DOMAIN)]
    if error.field:
        violation = BadRequest.FieldViolation(field=error.field, description=message)
        parts.append(BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        parts.append(retry)
    status = Status(code=status_code(error).value[0], message=message)
    for part in parts:
        status.details.add().Pack(part)
    return bytes(status.SerializeToString())


def error_from(code: StatusCode, message: str, details: bytes) -> RakvError:
    """The error that a status stands for; statuses that are not ours go by their code, except that
    of a request that is too large, which would be so again."""
    if not details and (sizes := _TOO_LARGE.search(message)):
        size, most = sizes.groups()
        return BodyTooLarge(
            f"the request's message of {size} bytes is larger than {most} bytes", field="body"
        )
    status = Status()
    try:
        status.ParseFromString(details)
    except DecodeError:
        status.Clear()
    reason, field, retry_after_s = "", "", -1.0
    for part in status.details:
        if (info := _unpacked(part, ErrorInfo())) and info.domain == DOMAIN:
            reason = info.reason.lower()
        if (bad := _unpacked(part, BadRequest())) and bad.field_violations:
            field = bad.field_violations[0].field
        if retry := _unpacked(part, RetryInfo()):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    kind = error_class(reason, lambda k: k.grpc_code == code.name)
    return kind(
        message or f"the call ended with {code.name}",
        field=field or None,
        retry_after_s=retry_after_s if retry_after_s >= 0 else None,
    )


def _unpacked(part: AnyMessage, message: Message) -> Any:
    """``message`` filled from ``part``, or nothing if that holds another kind."""
    return message if part.Unpack(message) else None
