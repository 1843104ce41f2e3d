"""Every error rakv-cluster raises on purpose.

    RakvError
    +-- InvalidRequest            400  INVALID_ARGUMENT    the request cannot work as sent
    |   +-- ContextLengthExceeded 400  INVALID_ARGUMENT
    |   +-- UnsupportedParameter  400  INVALID_ARGUMENT
    |   +-- BodyTooLarge          413  INVALID_ARGUMENT
    |   +-- RequestRefused        400  INVALID_ARGUMENT    it ended two replicas
    +-- MethodNotAllowed          405  UNIMPLEMENTED
    +-- Unauthenticated           401  UNAUTHENTICATED
    +-- PermissionDenied          403  PERMISSION_DENIED
    +-- NotFound                  404  NOT_FOUND           unknown document, chunk
    |   +-- ModelNotFound         404  NOT_FOUND
    +-- DeadlineExceeded          408  DEADLINE_EXCEEDED
    +-- RequestCancelled          499  CANCELLED
    +-- Overloaded                429  RESOURCE_EXHAUSTED  carries retry_after_s
    |   +-- RateLimited           429  RESOURCE_EXHAUSTED  the tenant's own limit
    +-- Unavailable               503  UNAVAILABLE         carries retry_after_s
    |   +-- ReplicaLost           503  UNAVAILABLE         another replica may go on
    +-- ConfigError                -   (start-up only)     settings, model or environment unusable
    |   +-- UnsupportedModel       -
    +-- StoreError                 -   (never reaches a client: a cache never breaks a request)
        +-- CorruptRecord          -
        +-- StoreUnavailable       -
        +-- WriterFenced           -

Each class states its HTTP status and gRPC code once; servers translate, nothing else decides a
status. All of them survive pickling, since they cross Ray actor boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar


class RakvError(Exception):
    """Base of the tree. ``message`` is safe to show to a client."""

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.field, self.retry_after_s))


def _rebuild(
    kind: type[RakvError], message: str, field: str | None, retry_after_s: float | None
) -> RakvError:
    return kind(message, field=field, retry_after_s=retry_after_s)


def error_class(code: str, otherwise: Callable[[type[RakvError]], bool]) -> type[RakvError]:
    """The class of this tree with ``code``; else the first, parents before children, for which
    ``otherwise`` holds; else :class:`RakvError`. How clients turn an answer back into an error."""
    kinds = list(_tree(RakvError))
    by_code = (kind for kind in kinds if kind.code == code)
    by_status = (kind for kind in kinds[1:] if otherwise(kind))
    return next(by_code, None) or next(by_status, RakvError)


def _tree(parent: type[RakvError]) -> Iterator[type[RakvError]]:
    """The classes of this module; what others derive from them stays theirs."""
    if parent.__module__ == __name__:
        yield parent
        for child in parent.__subclasses__():
            yield from _tree(child)


class InvalidRequest(RakvError, ValueError):
    """The request cannot be served as sent; ``field`` names the offending field."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    code = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested output do not fit the model's context."""

    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """A known parameter with a value that this server would have to ignore."""

    code = "unsupported_parameter"


class BodyTooLarge(InvalidRequest):
    """The request body is over the configured limit."""

    http_status = 413
    code = "body_too_large"


class RequestRefused(InvalidRequest):
    """Two replicas ended while they worked on this request; a third is not risked."""

    code = "request_refused"


class MethodNotAllowed(RakvError):
    """The path exists, but not for this method."""

    http_status = 405
    grpc_code = "UNIMPLEMENTED"
    code = "method_not_allowed"


class Unauthenticated(RakvError):
    """No or an unknown API key."""

    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    code = "invalid_api_key"


class PermissionDenied(RakvError):
    """The key is known but may not do this."""

    http_status = 403
    grpc_code = "PERMISSION_DENIED"
    code = "permission_denied"


class NotFound(RakvError, LookupError):
    """The named model or object does not exist."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "not_found"


class ModelNotFound(NotFound):
    """The request names a model that this service does not hold."""

    code = "model_not_found"


class DeadlineExceeded(RakvError, TimeoutError):
    """The request's deadline passed before it finished."""

    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"
    code = "deadline_exceeded"


class RequestCancelled(RakvError):
    """The client went away or cancelled."""

    http_status = 499
    grpc_code = "CANCELLED"
    code = "cancelled"


class Overloaded(RakvError):
    """A bounded queue is full; try again after ``retry_after_s``."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    code = "overloaded"


class RateLimited(Overloaded):
    """The tenant's own limit is used up; others are not affected."""

    code = "rate_limit_exceeded"


class Unavailable(RakvError):
    """No replica can take the request now; try again after ``retry_after_s``."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "unavailable"


class ReplicaLost(Unavailable):
    """The replica that worked on a request is gone; another one may go on with it."""

    code = "replica_lost"


class ConfigError(RakvError, ValueError):
    """Settings or environment do not allow the service to start."""

    code = "config_error"


class UnsupportedModel(ConfigError):
    """The model's architecture cannot work with this engine; the message says why."""

    code = "unsupported_model"


class StoreError(RakvError):
    """Something went wrong in the cache. Callers turn it into a miss and a counter."""

    code = "store_error"


class CorruptRecord(StoreError):
    """Stored bytes do not pass their checks."""


class StoreUnavailable(StoreError):
    """The environment, shard or disk cannot be used now."""


class WriterFenced(StoreError):
    """Another writer owns the shard."""
