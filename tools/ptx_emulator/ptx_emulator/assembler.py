"""Assembler: PTX text to listings of instructions, which `src/listing.h` reads."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .memory import Range

__all__ = ["Kernel", "Parameter", "UnsupportedPtxError", "is_buffer", "load"]


class UnsupportedPtxError(NotImplementedError):
    """PTX that the emulator has no meaning for."""


class Parameter(NamedTuple):
    """Parameter of a kernel.

    Attributes:
        offset: Offset in the parameter block in bytes.
        bytes: Size.
        type: PTX type, such as "u64"; "b8" for a structure.
    """

    offset: int
    bytes: int
    type: str


@dataclass(frozen=True)
class Kernel:
    """Kernel of a PTX text.

    Attributes:
        name: Mangled name.
        parameters: Parameters in order.
        listing: Instructions in the form that the machine reads.
    """

    name: str
    parameters: tuple[Parameter, ...]
    listing: str

    def pack(self, arguments: Sequence[Any]) -> bytes:
        """Returns the parameter block with these arguments.

        Args:
            arguments: As for `launch`.

        Raises:
            TypeError: If an argument does not fit its parameter, or their numbers differ.
        """
        if len(arguments) != len(self.parameters):
            count = len(self.parameters)
            raise TypeError(f"{self.name} has {count} parameters, got {len(arguments)} arguments")
        block = bytearray()
        for number, (parameter, argument) in enumerate(
            zip(self.parameters, arguments, strict=True)
        ):
            try:
                packed = _packed(parameter, argument)
            except (TypeError, OverflowError, struct.error) as error:
                what = f"argument {number} of {self.name} (.{parameter.type})"
                raise TypeError(f"{what}: {error}") from error
            block.extend(bytes(parameter.offset - len(block)) + packed)
        return bytes(block)


def is_buffer(argument: Any) -> bool:
    """Whether an argument is memory for a pointer parameter."""
    return not isinstance(argument, (bool, int, float, bytes))


def _packed(parameter: Parameter, argument: Any) -> bytes:
    size = parameter.bytes
    if isinstance(argument, bytes):
        if len(argument) != size:
            raise TypeError(f"takes {size} bytes, got {len(argument)}")
        return argument
    if is_buffer(argument):
        argument = Range.of(argument).address
    if parameter.type in ("f32", "f64"):
        return struct.pack("<f" if size == 4 else "<d", argument)
    if isinstance(argument, float):
        raise TypeError("takes an int, a buffer or bytes, got a float")
    return int(argument).to_bytes(size, "little", signed=argument < 0)


COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
COMBINATIONS = {"add", "max", "min", "inc"}
PARTS = {"lo", "hi", "wide"}  # of a product
SPACES = {"global": "global", "shared": "shared", "shared::cta": "shared", "param": "param"}
FLOAT_COMPARISONS = {f"{how}u" for how in COMPARISONS} | {"nan"}
ATOMIC = COMBINATIONS | {"global", "gpu", "relaxed", "acq_rel"}  # for all programs, not just one
# Numbers of operands, and modifiers between op and types. The machine rounds to nearest and has one
# cache, so some modifiers change nothing.
SYNTAX: dict[str, tuple[set[int], set[str]]] = {
    **dict.fromkeys(("abs", "neg", "not", "popc", "mov"), ({2}, set())),
    **dict.fromkeys(("and", "or", "xor", "max", "min", "rem", "shl", "shr"), ({3}, set())),
    **dict.fromkeys(("add", "sub", "div"), ({3}, {"rn"})),
    **dict.fromkeys(("sqrt", "rcp"), ({2}, {"rn"})),
    **dict.fromkeys(("bfe", "prmt", "selp"), ({4}, set())),
    **dict.fromkeys(("bar", "barrier"), ({1}, {"sync", "cta"})),
    **dict.fromkeys(("ret", "exit"), ({0}, {"uni"})),
    "atom": ({3}, ATOMIC),
    "red": ({2}, ATOMIC),
    "bra": ({1}, {"uni"}),
    "cvt": ({2, 3}, {"rn", "rzi"}),
    "cvta": ({2}, {"to", "global"}),
    "fence": ({0}, {"acq_rel", "sc", "gpu"}),
    "fma": ({4}, {"rn"}),
    "ld": ({2}, {*SPACES, "cg", "v2", "v4"}),
    "mad": ({4}, PARTS),
    "membar": ({0}, {"gl"}),
    "mul": ({3}, {"rn", *PARTS}),
    "redux": ({3}, {"sync", *COMBINATIONS}),
    "setp": ({3}, COMPARISONS | FLOAT_COMPARISONS),
    "shfl": ({5}, {"sync", "bfly", "idx"}),
    "st": ({2}, {*SPACES, "v2", "v4"} - {"param"}),
}
# Ops that need one of these modifiers to be defined.
NEEDED = {
    "atom": COMBINATIONS,
    "fence": {"gpu"},
    "membar": {"gl"},
    "red": COMBINATIONS,
    "redux": COMBINATIONS,
    "setp": COMPARISONS | FLOAT_COMPARISONS,
    "shfl": {"bfly", "idx"},
}
# Floating point ops without a rounding modifier may be contracted.
ROUNDED = {"add", "sub", "mul", "div", "fma", "sqrt", "rcp"}
SAME = {"membar": "fence", "barrier": "bar", "red": "atom", "cvta": "mov", "exit": "ret"}
# In the order of machine.cpp.
SPECIALS = {
    f"%{name}.{axis}": f"s{3 * number + place}"
    for number, name in enumerate(("tid", "ntid", "ctaid", "nctaid"))
    for place, axis in enumerate("xyz")
} | {"_": "_"}
TYPE = re.compile(r"pred|(?:bf|[busf])\d+(?:x2)?")
ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)([^{;]*)\{", re.DOTALL)
SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)\s+([\w$]+)(?:\[(\d*)\])?\s*;")
INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
LABEL = re.compile(r"\s*([\w$%]+)\s*:(?!:)")


def load(text: str) -> dict[str, Kernel]:
    """Assembles PTX.

    Args:
        text: PTX of one module.

    Returns:
        Its kernels by mangled name.

    Raises:
        UnsupportedPtxError: If it contains anything that cannot be emulated; the message names the
            instruction.
    """
    text = re.sub(r"//[^\n]*", "", text)
    text = re.split(r"^\s*\.section\b", text, maxsplit=1, flags=re.MULTILINE)[0]
    text = re.sub(r"^\s*\.(?:loc|file|pragma)\b[^\n]*", "", text, flags=re.MULTILINE)
    outside = ENTRY.split(text)[0]
    kernels = {
        entry[1]: _kernel(entry[1], entry[2], outside, _braced(text, entry.end()))
        for entry in ENTRY.finditer(text)
    }
    if not kernels:
        raise UnsupportedPtxError("the text has no kernel (.entry)")
    return kernels


def _braced(text: str, start: int) -> str:
    """Text up to the brace that matches the one before `start`."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    raise UnsupportedPtxError("a kernel without a closing brace")


def _kernel(name: str, parameters: str, outside: str, body: str) -> Kernel:
    placed = _parameters(parameters)
    symbols = {symbol: parameter.offset for symbol, parameter in placed.items()}
    shared_bytes = 0
    for alignment, bits, symbol, count in SHARED.findall(outside + body):
        shared_bytes = _aligned(shared_bytes, int(alignment or 1))
        symbols[symbol] = shared_bytes
        shared_bytes += int(bits) // 8 * int(count or (0 if _is_dynamic(outside, symbol) else 1))
    assembly = _Assembly(symbols)
    for statement in _statements(SHARED.sub("", body)):
        assembly.add(statement)
    lines = assembly.finished()
    head = f"{len(assembly.registers)} {shared_bytes}"
    return Kernel(name, tuple(placed.values()), "\n".join([head, *lines]))


def _is_dynamic(outside: str, symbol: str) -> bool:
    return re.search(rf"\b{re.escape(symbol)}\[\]", outside) is not None


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _parameters(text: str) -> dict[str, Parameter]:
    """Parameters by symbol, each aligned to its size or its own alignment."""
    placed = {}
    offset = 0
    for declaration in filter(None, map(str.strip, text.split(","))):
        found = re.fullmatch(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([busf](\d+))\s+(?:\.ptr\b.*\s)?(\w+)(?:\[(\d+)\])?",
            declaration,
        )
        if found is None:
            raise UnsupportedPtxError(f"unsupported parameter `{declaration}`")
        alignment, kind, bits, symbol, count = found.groups()
        size = int(bits) // 8
        offset = _aligned(offset, int(alignment or size))
        placed[symbol] = Parameter(offset, size * int(count or 1), kind)
        offset += placed[symbol].bytes
    return placed


def _statements(body: str) -> Iterator[str]:
    """Instructions, register declarations, and labels with their colons."""
    at = 0
    while at < len(body):
        if body[at].isspace() or body[at] in "{};":  # a scope
            at += 1
        elif label := LABEL.match(body, at):
            yield f"{label[1]}:"
            at = label.end()
        else:
            end = body.index(";", at)
            yield " ".join(body[at:end].split())
            at = end + 1


@dataclass
class _Assembly:
    """Assembler of one kernel, instruction by instruction."""

    symbols: dict[str, int]
    declared: set[str] = field(default_factory=set)  # "%r" for %r1, %r2 and so on
    registers: dict[str, int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    lines: list[dict[str, str]] = field(default_factory=list)

    def add(self, statement: str) -> None:
        if statement.endswith(":"):
            if statement[:-1] in self.labels:
                raise UnsupportedPtxError(f"duplicate label {statement}")
            self.labels[statement[:-1]] = len(self.lines)
            return
        if statement.startswith(".reg"):
            _, _, names = statement.split(maxsplit=2)
            self.declared.update(name.split("<")[0].strip() for name in names.split(","))
            return
        found = INSTRUCTION.fullmatch(statement)
        if found is None:
            raise UnsupportedPtxError(f"`{statement}`: not an instruction")
        negated, predicate, name, rest = found.groups()
        line = {"text": statement}
        if predicate:
            line["unless" if negated else "if"] = self._operand(predicate)
        try:
            self._instruct(line, name.split("."), _operands(rest))
        except (UnsupportedPtxError, IndexError, ValueError) as error:
            raise UnsupportedPtxError(f"`{statement}`: {error}") from error
        self.lines.append(line)

    def finished(self) -> Iterator[str]:
        # Target of a branch to the end.
        for line in [*self.lines, {"op": "ret", "text": "the end"}]:
            if "target" in line:
                if line["target"] not in self.labels:
                    raise UnsupportedPtxError(f"`{line['text']}`: no such label")
                line = {**line, "target": str(self.labels[line["target"]])}
            yield "\t".join(f"{key}={value}" for key, value in line.items())

    def _instruct(self, line: dict[str, str], name: list[str], operands: list[str]) -> None:
        op, *modifiers = name
        _require_known(op, modifiers, operands)
        line["op"] = SAME.get(op, op)
        if op == "rcp":
            line["op"] = "div"
            operands.insert(1, "0d3FF0000000000000" if "f64" in modifiers else "0f3F800000")
        self._modify(line, modifiers)
        if op == "bra":
            line["target"] = operands[0]
        elif op in ("bar", "barrier"):
            if operands != ["0"]:
                raise UnsupportedPtxError("only barrier 0 of all threads is supported")
        elif op in ("st", "red"):
            self._address(line, operands[0])
            line["from"] = self._list(operands[1:])
        elif op in ("ld", "atom"):
            line["to"] = self._list(operands[:1])
            self._address(line, operands[1])
            line["from"] = self._list(operands[2:])
        elif operands:
            line["to"] = self._list(operands[:1])
            line["from"] = self._list(operands[1:])
            if "|" in operands[0] and op != "shfl":
                raise UnsupportedPtxError("a second result is not supported")

    def _modify(self, line: dict[str, str], modifiers: list[str]) -> None:
        op = line["op"]
        for modifier in modifiers:
            if TYPE.fullmatch(modifier):
                line["source" if "type" in line else "type"] = modifier
            elif modifier in SPACES and op in ("ld", "st", "atom"):
                line["space"] = SPACES[modifier]
            elif op == "setp":
                line["compare"] = modifier.removesuffix("u")
                if modifier.endswith("u"):
                    line["or_unordered"] = "1"
            elif op in ("atom", "redux") and modifier in COMBINATIONS:
                line["combine"] = modifier
            elif modifier == "bfly":
                line["butterfly"] = "1"
            elif modifier in ("hi", "wide"):
                line["part"] = modifier
            elif modifier == "acq_rel" and op == "atom":
                line["ordered"] = "1"
        if op in ("ld", "st", "atom") and "space" not in line:
            raise UnsupportedPtxError("generic addresses are not supported")

    def _address(self, line: dict[str, str], operand: str) -> None:
        found = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+)\s*)?\]", operand)
        if found is None:
            raise UnsupportedPtxError(f"unsupported address {operand}")
        offset = int(found[2] or "0", 0)
        if found[1] in self.symbols:
            offset += self.symbols[found[1]]
        else:
            line["base"] = self._operand(found[1])
        line["offset"] = str(offset)

    def _list(self, operands: list[str]) -> str:
        """Operand for several in braces, or for a register with a predicate."""
        singles = []
        for operand in operands:
            singles += re.split(r"[,|]", operand.strip("{} "))
        return ",".join(self._operand(single.strip()) for single in singles)

    def _operand(self, text: str) -> str:
        if text in SPECIALS:
            return SPECIALS[text]
        if text in self.symbols:
            return f"n{self.symbols[text]}"
        if bits := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text):
            return f"n{_signed(int(bits[1], 16))}"
        if re.fullmatch(r"-?(?:0[xX][0-9A-Fa-f]+|\d+)U?", text):
            return f"n{_signed(int(text.removesuffix('U'), 0))}"
        if text in self.declared or text.rstrip("0123456789") in self.declared:
            return f"r{self.registers.setdefault(text, len(self.registers))}"
        raise UnsupportedPtxError(f"unsupported operand {text}")


def _require_known(op: str, modifiers: list[str], operands: list[str]) -> None:
    if op not in SYNTAX:
        raise UnsupportedPtxError(f"unsupported instruction {op}")
    counts, allowed = SYNTAX[op]
    if len(operands) not in counts:
        takes = " or ".join(map(str, sorted(counts)))
        raise UnsupportedPtxError(f"takes {takes} operands, got {len(operands)}")
    types = [modifier for modifier in modifiers if TYPE.fullmatch(modifier)]
    others = set(modifiers) - set(types)
    if unknown := others - allowed:
        raise UnsupportedPtxError(f"unsupported modifier .{min(unknown)}")
    if op in NEEDED and not others & NEEDED[op]:
        raise UnsupportedPtxError(f"needs one of .{', .'.join(sorted(NEEDED[op]))}")
    is_float = any(map(_is_float, types))
    if op in ROUNDED and is_float and "rn" not in others:
        raise UnsupportedPtxError("needs .rn: without a rounding modifier it may be contracted")
    if op in ("mul", "mad") and not is_float and not others & PARTS:
        raise UnsupportedPtxError("needs .lo, .hi or .wide")
    if op == "cvt" and ("rzi" in others) != (is_float and not _is_float(types[0])):
        raise UnsupportedPtxError("takes .rzi from a float to an integer, and only there")


def _is_float(kind: str) -> bool:
    return kind.startswith(("f", "bf"))


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _operands(text: str) -> list[str]:
    """Splits at the commas outside of braces and brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)]
