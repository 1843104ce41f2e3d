"""The C kernels of ``native*.c``: compiled at load, declared for ctypes, proven against oneDNN.

They read the weights where oneDNN has packed them (no further copy) and round as oneDNN's products
do, so that steps of few rows run here and steps of many there, with equal bits. Both are properties
of this CPU and this PyTorch: :func:`native_layers` tests them for every shape of weight and refuses
otherwise. Nothing is downloaded and nothing stays on disk; without GCC the decoder of
:mod:`rakv_cluster.model.fused` serves.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from rakv_cluster.errors import UnsupportedModel
from rakv_cluster.model.linear import Kernel, Linear
from rakv_cluster.model.llama import Layer, LlamaWeights

PANEL = 64
"""Outputs that stand side by side in oneDNN's packed order; weights have a multiple of it."""

LANES = 16
"""Floats of one vector; weights have a multiple of so many inputs, and heads."""

_SOURCES = [
    str(Path(__file__).with_name(name))
    for name in ("native.c", "native_attention.c", "native_drift.c")
]
_COMPILERS = ("gcc", "cc")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_COMPILE_S = 60.0
_BLOCKS = (512, 1024)
"""Inputs per chain of multiply-adds, as oneDNN has been seen to cut them."""

_CHECK_ROWS = (1, 2, 5, 8, 13)

_Address = ctypes.c_void_p
_Int = ctypes.c_int64


class _Struct(ctypes.Structure):
    """A structure that is passed by its address, and keeps alive what it points to."""

    kept: tuple[object, ...] = ()

    @property
    def address(self) -> int:
        """Where it lies."""
        return ctypes.addressof(self)


class NativeWeight(_Struct):
    """``Weight`` of native.c."""

    _fields_ = (
        ("packed", _Address),
        ("bias", _Address),
        ("outputs", _Int),
        ("inputs", _Int),
        ("block", _Int),
    )


class NativeLayer(_Struct):
    """``Layer`` of native.c."""

    _fields_ = (
        ("input_norm", _Address),
        ("mlp_norm", _Address),
        ("qkv", NativeWeight),
        ("output", NativeWeight),
        ("gate_up", NativeWeight),
        ("down", NativeWeight),
    )


class NativeShape(_Struct):
    """``Shape`` of native.c."""

    _fields_ = (
        ("hidden", _Int),
        ("heads", _Int),
        ("kv_heads", _Int),
        ("head_dim", _Int),
        ("inner", _Int),
        ("eps", ctypes.c_double),
        ("scale", ctypes.c_double),
    )


class NativeStep(_Struct):
    """``Step`` of native.c."""

    _fields_ = (
        ("rows", _Int),
        ("hidden", _Address),
        ("cosines", _Address),
        ("sines", _Address),
        ("positions", _Address),
        ("keys", _Address),
        ("layer_stride", _Address),
        ("value_stride", _Address),
        ("head_stride", _Address),
        ("tiles", _Int),
        ("tile_rows", _Int),
        ("tile_start", _Address),
        ("scratch", _Address),
        ("threads", _Int),
    )


class NativeFollowing(_Struct):
    """``Following`` of native_drift.c."""

    _fields_ = (
        ("low", _Int),
        ("count", _Int),
        ("kv_heads", _Int),
        ("head_dim", _Int),
        ("half", _Int),
        ("repaired", _Int),
        ("runs", _Int),
        ("positions", _Address),
        ("starts", _Address),
        ("row", _Address),
        ("follows", _Address),
        ("cosines", _Address),
        ("sines", _Address),
        ("before", _Address),
        ("decay", ctypes.c_double),
        ("prior", ctypes.c_double),
        ("clip", ctypes.c_double),
        ("space", _Address),
        ("threads", _Int),
    )


_SIGNATURES: dict[str, tuple[type, ...]] = {
    "rakv_layers": (_Address, _Address, _Address, _Int, _Int),
    "rakv_product": (_Address, _Address, _Int, _Address, _Int),
    "rakv_collapse": (_Address,),
    "rakv_add_norm": (*(_Address,) * 5, _Int, _Int),
    "rakv_place": (_Address, _Address, _Address, _Int),
    "rakv_attend": (_Address, _Address, _Address, _Int, _Address),
    "rakv_follow": (_Address, _Int, _Address, _Int, _Int),
    "rakv_activate": (_Address, _Address, _Address, _Int, _Int),
}


@functools.cache
def native_library() -> ctypes.CDLL:
    """The compiled kernels; once per process, in a second or so.

    Raises :class:`UnsupportedModel` where no GCC is found or it fails.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise UnsupportedModel("native kernels need a C compiler: install gcc")
    with tempfile.TemporaryDirectory(prefix="rakv-native-") as folder:
        target = Path(folder) / "native.so"
        command = [compiler, *_FLAGS, *_SOURCES, "-o", str(target), "-lm"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_COMPILE_S, check=False
            )
            if done.returncode:
                raise UnsupportedModel(f"native kernels do not compile: {done.stderr[-500:]}")
            library = ctypes.CDLL(str(target))
        except (OSError, subprocess.SubprocessError) as error:
            raise UnsupportedModel(f"native kernels cannot be used: {error}") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.rakv_scratch.argtypes = (_Address, _Int, _Int, _Int)
    library.rakv_scratch.restype = _Int
    library.rakv_following_space.argtypes = (_Address,)
    library.rakv_following_space.restype = _Int
    return library


def native_shape(weights: LlamaWeights) -> NativeShape:
    """The numbers of the layers."""
    shape = weights.shape
    return NativeShape(
        hidden=weights.embedding.shape[1],
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        inner=weights.layers[0].down.weight.shape[1],
        eps=weights.norm_eps,
        scale=shape.scale,
    )


class NativeWeights:
    """Packed weights as the kernels take them. Valid as long as ``weights`` stay packed."""

    def __init__(self, library: ctypes.CDLL, weights: LlamaWeights) -> None:
        """Raises :class:`UnsupportedModel` for a dtype, size, order or rounding that differs from
        what the kernels expect."""
        if weights.embedding.dtype != torch.float32 or weights.embedding.device.type != "cpu":
            raise UnsupportedModel("native kernels compute in float32 on the CPU")
        if weights.shape.head_dim % LANES:
            raise UnsupportedModel(f"native kernels want heads in multiples of {LANES}")
        self._library = library
        self._blocks: dict[tuple[int, int], int] = {}
        self.shape = native_shape(weights)
        self.layers = (NativeLayer * len(weights.layers))(*map(self._layer, weights.layers))
        self.head = self._weight(weights.head)

    def _layer(self, layer: Layer) -> NativeLayer:
        return NativeLayer(
            layer.input_norm.data_ptr(),
            layer.mlp_norm.data_ptr(),
            *(self._weight(linear) for linear in layer.linears),
        )

    def _weight(self, linear: Linear) -> NativeWeight:
        outputs, inputs = linear.weight.shape
        if outputs % PANEL or inputs % LANES or _packed_bytes(linear) != linear.nbytes:
            raise UnsupportedModel(f"native kernels have no product of {outputs} x {inputs}")
        bias = linear.bias.data_ptr() if linear.bias is not None else None
        packed = torch.ops.mkldnn.data_ptr(linear.packed)
        shape = (outputs, inputs)
        if shape not in self._blocks:
            candidates = {n: NativeWeight(packed, bias, outputs, inputs, n) for n in _BLOCKS}
            self._blocks[shape] = _rounding_block(self._library, linear, candidates)
        weight = NativeWeight(packed, bias, outputs, inputs, self._blocks[shape])
        self._library.rakv_collapse(weight.address)
        return weight


def _packed_bytes(linear: Linear) -> int:
    """Bytes of the packed copy, padding included; 0 if there is none to read."""
    if linear.packed is None or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return 0
    return int(torch.ops.mkldnn._nbytes(linear.packed))


def _rounding_block(
    library: ctypes.CDLL, linear: Linear, candidates: Mapping[int, NativeWeight]
) -> int:
    """The block with which products agree with oneDNN's in every bit."""
    outputs, inputs = linear.weight.shape
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randn(max(_CHECK_ROWS), inputs, generator=generator)
    expected = linear.apply(x, Kernel.PACKED)
    for block, weight in candidates.items():
        agrees = True
        for rows in _CHECK_ROWS:
            found = torch.empty(rows, outputs)
            threads = torch.get_num_threads()
            library.rakv_product(weight.address, x.data_ptr(), rows, found.data_ptr(), threads)
            agrees = agrees and torch.equal(found, expected[:rows])
        if agrees:
            return block
    raise UnsupportedModel(f"native products of {outputs} x {inputs} do not round as oneDNN's")
