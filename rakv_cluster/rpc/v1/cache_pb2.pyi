from rakv_cluster.rpc.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WarmRequest(_message.Message):
    __slots__ = ("input",)
    INPUT_FIELD_NUMBER: _ClassVar[int]
    input: _generation_pb2.Input
    def __init__(self, input: _Optional[_Union[_generation_pb2.Input, _Mapping]] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("usage",)
    USAGE_FIELD_NUMBER: _ClassVar[int]
    usage: _generation_pb2.Usage
    def __init__(self, usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("input",)
    INPUT_FIELD_NUMBER: _ClassVar[int]
    input: _generation_pb2.Input
    def __init__(self, input: _Optional[_Union[_generation_pb2.Input, _Mapping]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("prompt_tokens", "chunks", "stored_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkState]
    stored_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[ChunkState, _Mapping]]] = ..., stored_tokens: _Optional[int] = ...) -> None: ...

class ChunkState(_message.Message):
    __slots__ = ("start", "end", "nodes", "stored_bytes")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    nodes: _containers.RepeatedScalarFieldContainer[str]
    stored_bytes: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., nodes: _Optional[_Iterable[str]] = ..., stored_bytes: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("input", "owner", "ttl_s")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    input: _generation_pb2.Input
    owner: str
    ttl_s: float
    def __init__(self, input: _Optional[_Union[_generation_pb2.Input, _Mapping]] = ..., owner: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pinned_chunks", "prompt_chunks")
    PINNED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    pinned_chunks: int
    prompt_chunks: int
    def __init__(self, pinned_chunks: _Optional[int] = ..., prompt_chunks: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("input", "owner")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    input: _generation_pb2.Input
    owner: str
    def __init__(self, input: _Optional[_Union[_generation_pb2.Input, _Mapping]] = ..., owner: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("ended_pins",)
    ENDED_PINS_FIELD_NUMBER: _ClassVar[int]
    ended_pins: int
    def __init__(self, ended_pins: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("input",)
    INPUT_FIELD_NUMBER: _ClassVar[int]
    input: _generation_pb2.Input
    def __init__(self, input: _Optional[_Union[_generation_pb2.Input, _Mapping]] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("removed_records",)
    REMOVED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    removed_records: int
    def __init__(self, removed_records: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("shards_by_node", "replica")
    class ShardsByNodeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ShardStats
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ShardStats, _Mapping]] = ...) -> None: ...
    class ReplicaEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SHARDS_BY_NODE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    shards_by_node: _containers.MessageMap[str, ShardStats]
    replica: _containers.ScalarMap[str, float]
    def __init__(self, shards_by_node: _Optional[_Mapping[str, ShardStats]] = ..., replica: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ShardStats(_message.Message):
    __slots__ = ("records", "stored_bytes", "budget_bytes", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    records: int
    stored_bytes: int
    budget_bytes: int
    counters: _containers.ScalarMap[str, int]
    def __init__(self, records: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...
