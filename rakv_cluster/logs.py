"""Logs as lines of JSON, and the id that ties together what was said about one request.

The id comes with the request or is made at the door, goes back in the answer's headers, and travels
with the request to the replica. What clients send, prompts above all, is never logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

HEADER = "x-request-id"
"""Where clients send an id of their own and find the one that was used: HTTP header and gRPC
metadata."""

REQUEST_ID: ContextVar[str] = ContextVar("rakv_request_id", default="")
"""Of the request that this task works on; empty outside of one."""

_LOGGERS = ("rakv", "rakv_cluster")
_SOUND_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")


def begin_request(given: str) -> str:
    """Take over a client's id, or make one if it sent none that is fit for a log; from here on
    this task's lines carry it."""
    request_id = given if _SOUND_ID.fullmatch(given) else uuid.uuid4().hex
    REQUEST_ID.set(request_id)
    return request_id


def fields(**values: object) -> dict[str, Any]:
    """The ``extra`` of a log call: fields of the JSON line beside its message."""
    return {"rakv_fields": values}


class JsonLines(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, ``request_id``
    where there is one, further fields, and ``exception`` with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        more = getattr(record, "rakv_fields", {})
        line |= more if isinstance(more, Mapping) else {}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logs(chosen: LogFormat, stream: TextIO = sys.stderr) -> None:
    """Write this process's lines as ``chosen``: "json" to ``stream``, a line per request
    included; "text" leaves logging as it is. May be called again."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if isinstance(handler.formatter, JsonLines):
                logger.removeHandler(handler)
        logger.propagate = chosen != "json"
        if chosen == "json":
            writer = logging.StreamHandler(stream)
            writer.setFormatter(JsonLines())
            logger.addHandler(writer)
            logger.setLevel(logging.INFO)
