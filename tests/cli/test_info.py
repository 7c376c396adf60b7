"""`python -m ampfast info`: package and machine."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

import ampfast
from ampfast import __main__ as command_line
from ampfast import backends
from ampfast.cli import info

KINDS = {
    "versions": dict,
    "extension": dict,
    "devices": list,
    "backends": list,
    "AMPFAST_BACKEND": str | None,
}
CPU = ("device", "properties", "backend", "error")


def test_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMPFAST_BACKEND", raising=False)
    facts = info.collect()
    assert facts.keys() == KINDS.keys()
    for key, kind in KINDS.items():
        assert isinstance(facts[key], kind), key
    assert facts["AMPFAST_BACKEND"] is None
    versions = ("ampfast", "python", "platform", "torch", "cuda", "hip", "triton")
    assert tuple(facts["versions"]) == versions
    assert facts["versions"]["torch"] == torch.__version__
    cpu = facts["devices"][0]
    assert tuple(cpu) == CPU
    assert (cpu["device"], cpu["error"]) == ("cpu", None)
    assert cpu["properties"].endswith(f", {torch.get_num_threads()} threads")
    assert cpu["backend"] == backends.default_for(torch.device("cpu"))
    # Headers lack the build metadata of torch's version, as in 2.13.0+cpu.
    assert torch.__version__.startswith(facts["extension"]["torch"].partition("+")[0])
    for found, report in zip(facts["backends"], backends.report(), strict=True):
        assert found == {**asdict(report), "device_types": list(report.device_types)}
    documented = info.collect.__doc__
    nested = [*facts["versions"], *facts["extension"], *cpu, *facts["backends"][0]]
    assert [key for key in [*facts, *nested] if f"``{key}``" not in documented] == []


@pytest.mark.parametrize("kind", ["unknown", "unavailable"])
def test_backend_of_the_environment_that_cannot_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unavailable = [report.name for report in backends.report() if not report.available]
    if kind == "unavailable" and not unavailable:
        pytest.skip("every backend is available here")
    name = "nonsense" if kind == "unknown" else unavailable[0]
    monkeypatch.setenv("AMPFAST_BACKEND", name)
    facts = info.collect()
    assert facts["AMPFAST_BACKEND"] == name
    cpu = facts["devices"][0]
    assert cpu["backend"] is None
    assert name in cpu["error"]


@pytest.mark.parametrize("described", [True, False], ids=["described", "not described"])
def test_accelerators_are_listed(described: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="Some Card", total_memory=3 * 2**30, major=9, minor=0)
    known = {"get_device_properties": lambda device: properties} if described else {}
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**known))
    monkeypatch.setattr(backends, "default_for", lambda device: f"for {device}")
    facts = info.collect()
    assert [device["device"] for device in facts["devices"]] == ["cpu", "cuda:0", "cuda:1"]
    card = facts["devices"][2]
    assert card["properties"] == (str(properties) if described else "cuda:1")
    assert card["backend"] == "for cuda:1"


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["info"]) == 0
    assert json.loads(capsys.readouterr().out) == info.collect()
    with pytest.raises(SystemExit):
        command_line.main([])
    assert "required: command" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ampfast {ampfast.__version__}\n"
