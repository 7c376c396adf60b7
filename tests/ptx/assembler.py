"""Assembler: PTX text to listings of instructions for the machine that runs them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["Kernel", "UnknownPtx", "kernels_of"]


class UnknownPtx(Exception):  # noqa: N818
    """Unsupported PTX."""


@dataclass(frozen=True)
class Kernel:
    """Kernel of a PTX text.

    Attributes:
        name: Mangled name.
        parameters: Offset and size of each parameter in bytes.
        listing: Input of the machine.
    """

    name: str
    parameters: list[tuple[int, int]]
    listing: str

    def packed(self, arguments: Sequence[bytes]) -> bytes:
        """Parameter block with these arguments; missing ones at the end are zero."""
        place, size = self.parameters[-1]
        block = bytearray(place + size)
        for (place, size), argument in zip(self.parameters, arguments, strict=False):
            block[place : place + size] = argument
        return bytes(block)


COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
COMBINATIONS = {"add", "max", "min", "inc"}
SPACES = {"global": "global", "shared": "shared", "shared::cta": "shared", "param": "param"}
FLOAT_COMPARISONS = {f"{how}u" for how in COMPARISONS} | {"nan"}
ATOMIC = COMBINATIONS | {"global", "gpu", "relaxed", "acq_rel"}  # for all programs, not just one
# Numbers of operands, and modifiers between op and types. The machine rounds to nearest and has one
# cache, so some modifiers change nothing.
SYNTAX: dict[str, tuple[set[int], set[str]]] = {
    **dict.fromkeys(("abs", "neg", "not", "popc", "mov"), ({2}, set())),
    **dict.fromkeys(("and", "or", "xor", "max", "min", "shl", "shr"), ({3}, set())),
    **dict.fromkeys(("add", "sub", "div"), ({3}, {"rn"})),
    **dict.fromkeys(("sqrt", "rcp"), ({2}, {"rn"})),
    **dict.fromkeys(("bfe", "prmt", "selp"), ({4}, set())),
    **dict.fromkeys(("bar", "barrier"), ({1}, {"sync", "cta"})),
    **dict.fromkeys(("ret", "exit"), ({0}, {"uni"})),
    "atom": ({3}, ATOMIC),
    "red": ({2}, ATOMIC),
    "bra": ({1}, {"uni"}),
    "cvt": ({2, 3}, {"rn"}),
    "cvta": ({2}, {"to", "global"}),
    "fence": ({0}, {"acq_rel", "sc", "gpu"}),
    "ld": ({2}, {*SPACES, "cg", "v2", "v4"}),
    "mad": ({4}, {"lo", "wide"}),
    "membar": ({0}, {"gl"}),
    "mul": ({3}, {"rn", "lo", "wide"}),
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
ROUNDED = {"add", "sub", "mul", "div", "sqrt", "rcp"}
SAME = {"membar": "fence", "barrier": "bar", "red": "atom", "cvta": "mov", "exit": "ret"}
SPECIALS = {"%tid.x": "tid", "%ctaid.x": "ctaid", "%nctaid.x": "nctaid", "_": "_"}
TYPE = re.compile(r"pred|(?:bf|[busf])\d+(?:x2)?")
ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)([^{;]*)\{", re.DOTALL)
SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)\s+([\w$]+)(?:\[(\d*)\])?\s*;")
INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
LABEL = re.compile(r"\s*([\w$%]+)\s*:(?!:)")


def kernels_of(text: str) -> dict[str, Kernel]:
    """Returns the kernels of a text by name.

    Raises:
        UnknownPtx: If something in it has no meaning here.
    """
    text = re.sub(r"//[^\n]*", "", text)
    text = re.split(r"^\s*\.section\b", text, maxsplit=1, flags=re.MULTILINE)[0]
    text = re.sub(r"^\s*\.(?:loc|file|pragma)\b[^\n]*", "", text, flags=re.MULTILINE)
    found = {}
    outside = ENTRY.split(text)[0]
    for entry in ENTRY.finditer(text):
        body = _braced(text, entry.end())
        found[entry[1]] = _kernel(entry[1], entry[2], outside, body)
    return found


def _braced(text: str, start: int) -> str:
    """Text up to the brace that matches the one before `start`."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    raise UnknownPtx("a body without an end")


def _kernel(name: str, parameters: str, outside: str, body: str) -> Kernel:
    places = _places_of_parameters(parameters)
    symbols = {symbol: place for symbol, (place, _) in places.items()}
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
    return Kernel(name, list(places.values()), "\n".join([head, *lines]))


def _is_dynamic(outside: str, symbol: str) -> bool:
    return re.search(rf"\b{re.escape(symbol)}\[\]", outside) is not None


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _places_of_parameters(text: str) -> dict[str, tuple[int, int]]:
    """Offsets of parameters, each aligned to its size or its own alignment."""
    places = {}
    offset = 0
    for parameter in filter(None, map(str.strip, text.split(","))):
        found = re.fullmatch(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)\s+(?:\.ptr\b.*\s)?(\w+)(?:\[(\d+)\])?",
            parameter,
        )
        if found is None:
            raise UnknownPtx(f"a parameter `{parameter}`")
        size = int(found[2]) // 8
        offset = _aligned(offset, int(found[1] or size))
        places[found[3]] = offset, size * int(found[4] or 1)
        offset += places[found[3]][1]
    return places


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
                raise UnknownPtx(f"a second label {statement}")
            self.labels[statement[:-1]] = len(self.lines)
            return
        if statement.startswith(".reg"):
            _, _, names = statement.split(maxsplit=2)
            self.declared.update(name.split("<")[0].strip() for name in names.split(","))
            return
        found = INSTRUCTION.fullmatch(statement)
        if found is None:
            raise UnknownPtx(f"`{statement}`")
        negated, predicate, name, rest = found.groups()
        line = {"text": statement}
        if predicate:
            line["unless" if negated else "if"] = self._operand(predicate)
        try:
            self._instruct(line, name.split("."), _operands(rest))
        except (UnknownPtx, IndexError, ValueError) as error:
            raise UnknownPtx(f"`{statement}`: {error}") from error
        self.lines.append(line)

    def finished(self) -> Iterator[str]:
        # Target of a branch to the end.
        for line in [*self.lines, {"op": "ret", "text": "the end"}]:
            if "target" in line:
                line = {**line, "target": str(self.labels[line["target"]])}
            yield "\t".join(f"{key}={value}" for key, value in line.items())

    def _instruct(self, line: dict[str, str], name: list[str], operands: list[str]) -> None:
        op, *modifiers = name
        _require_known(op, modifiers, operands)
        line["op"] = SAME.get(op, op)
        if op == "rcp":
            line["op"] = "div"
            operands.insert(1, "0f3F800000")
            if "f32" not in modifiers:
                raise UnknownPtx("a reciprocal of another type")
        self._modify(line, modifiers)
        if op == "bra":
            line["target"] = operands[0]
        elif op in ("bar", "barrier"):
            if operands != ["0"]:
                raise UnknownPtx("a barrier for a part of the program")
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
                raise UnknownPtx("a second result")

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
            elif modifier == "wide":
                line["wide"] = "1"
            elif modifier == "acq_rel" and op == "atom":
                line["ordered"] = "1"
        if op in ("ld", "st", "atom") and "space" not in line:
            raise UnknownPtx("an address of any kind of memory")

    def _address(self, line: dict[str, str], operand: str) -> None:
        found = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+)\s*)?\]", operand)
        if found is None:
            raise UnknownPtx(f"the address {operand}")
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
        raise UnknownPtx(f"the operand {text}")


def _require_known(op: str, modifiers: list[str], operands: list[str]) -> None:
    if op not in SYNTAX:
        raise UnknownPtx(f"the instruction {op}")
    counts, allowed = SYNTAX[op]
    if len(operands) not in counts:
        raise UnknownPtx(f"{len(operands)} operands")
    types = [modifier for modifier in modifiers if TYPE.fullmatch(modifier)]
    others = set(modifiers) - set(types)
    if unknown := others - allowed:
        raise UnknownPtx(f"the modifier {min(unknown)}")
    if op in NEEDED and not others & NEEDED[op]:
        raise UnknownPtx(f"none of {', '.join(sorted(NEEDED[op]))}")
    is_float = any(name.startswith(("f", "bf")) for name in types)
    if op in ROUNDED and is_float and "rn" not in others:
        raise UnknownPtx("a rounding that is not said")
    if op in ("mul", "mad") and not is_float and not others & {"lo", "wide"}:
        raise UnknownPtx("a part of the product that is not said")


def _signed(number: int) -> int:
    return struct.unpack("<q", struct.pack("<Q", number & 0xFFFF_FFFF_FFFF_FFFF))[0]


def _operands(text: str) -> list[str]:
    """Splits at the commas outside of braces and brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)]
