"""README and documentation: code blocks run; commands, files, functions and links exist."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparison import TorchScaler

import ampfast
from ampfast import GradScaler

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
USERS, MAKERS = sorted(DOCS.glob("*.md")), sorted(DOCS.glob("contributing/*.md"))
PAGES = [*USERS, *MAKERS]
BLOCKS = [
    (page, text.count("\n", 0, found.start(1)) + 1, found[1])
    for page in (README, *PAGES)
    for text in [page.read_text(encoding="utf-8")]
    for found in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")

# Globals of blocks that ran: torch's reducer, as the last owner of a gloo group, holds the GIL
# while it waits for a thread that may need it (pytorch/pytorch#56297).
kept: list[dict[str, Any]] = []


@pytest.fixture
def no_group_left() -> Iterator[None]:
    """Destroys a process group that a block leaves behind, and fails."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("it left a process group behind")


@pytest.mark.sweep
@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.usefixtures("no_group_left")
@pytest.mark.parametrize(
    ("page", "line", "code"), BLOCKS, ids=[f"{page.stem}:{line}" for page, line, _ in BLOCKS]
)
def test_each_block_runs(page: Path, line: int, code: str) -> None:
    if "DataParallel(" in code and torch.cuda.is_available():
        pytest.skip("it is for a CPU, and DataParallel takes every GPU")
    torch.manual_seed(0)
    kept.append({"__name__": "__main__"})
    # A traceback names the line of the page.
    exec(compile("\n" * (line - 1) + code, page, "exec"), kept[-1])


def test_no_code_hides_behind_another_fence() -> None:
    for page in (README, *PAGES):
        fences = re.findall(r"^[ \t]*[`~]{3,}[ \t]*(\S*)", page.read_text(encoding="utf-8"), re.M)
        assert set(fences) <= {"", "python", "console", "diff"}, page.name
        assert fences.count("python") == sum(block[0] == page for block in BLOCKS), page.name
    assert any(block[0] == README for block in BLOCKS)


def test_quoted_output_is_that_of_the_committed_runs() -> None:
    printed = (ROOT / "benchmarks/results/printed.txt").read_text(encoding="utf-8")
    readme, migration, spikes = (
        page.read_text("utf-8") for page in (README, DOCS / "migration.md", DOCS / "spikes.md")
    )
    command = "python -m ampfast compare --steps 100 examples/digits.py --scaler torch\n"
    assert migration.count(command) == printed.count(command) == 1
    quoted = migration.split(command)[1].split("```")[0].strip()
    lines = printed.split(command)[1].split("\n\n$ ")[0].splitlines()
    assert [line for line in lines if line in quoted.splitlines()] == quoted.splitlines()
    losses = re.findall(r"^cl.+?  +(\d\.\d+)  ", printed, re.MULTILINE)
    assert len(losses) == 3
    told = re.findall(r"^\|.*bad batches.* \| (\d\.\d+) \|$", spikes, re.MULTILINE)
    assert told == [f"{float(loss):.2f}" for loss in losses]
    assert "in 10 seeds torch's scaler ruined 10 models" in printed
    assert "ruins 10 of 10 models, ampfast's none" in readme


def test_every_page_is_in_the_menu_or_linked_from_the_page_for_contributors() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = settings.split("\nnav:\n")[1].split("\n\n")[0]
    listed = {DOCS / path for path in re.findall(r": (\S+\.md)$", nav, re.MULTILINE)}
    makers = DOCS / "contributing" / "index.md"
    links = {makers.parent / path for path, _ in LINK.findall(makers.read_text("utf-8"))}
    assert {*USERS, makers} == listed
    assert {*MAKERS} <= links | {makers}
    assert re.findall(r"^  - (.+):$", nav, re.MULTILINE) == ["Start", "Use", "Reference"]


def test_pages_for_users_are_short() -> None:
    """README has 90 lines, all others 14,000 words; those with an API have docstrings besides."""
    assert len(README.read_text("utf-8").splitlines()) <= 90
    assert sum(len(page.read_text("utf-8").split()) for page in USERS) <= 14_000


def test_the_search_splits_words_at_parentheses() -> None:
    """Else it finds none of the short names, which stand in them."""
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    split = [*re.findall(r"^      separator: '(.+)'$", settings, re.MULTILINE), r"[\s\-]+"][0]
    words = re.split(split, (DOCS / "which_dtype.md").read_text("utf-8"))
    assert {"bf16", "fp16", "mps", "Scaler"} <= {*words}


@pytest.mark.parametrize("page", [README, *USERS], ids=lambda page: page.stem)
def test_no_table_is_wider_than_a_phone(page: Path) -> None:
    """390 pixels hold about 50 letters, less a letter at each side of a cell."""
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text("utf-8"), re.MULTILINE):
        shown = re.sub(r"\]\([^)]*\)|[\[`*]", "", table).splitlines()
        columns = zip(*(row.strip("|").split("|") for row in shown), strict=True)
        widths = [max(len(w) for w in " ".join(c).split()) for c in columns]
        assert sum(widths) + 2 * len(widths) <= 50, widths


def test_the_version_is_the_same_in_all_pages() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    [newest, *_] = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    released, version = newest != "Unreleased", ampfast.__version__
    assert newest in (version, "Unreleased")
    status = (DOCS / "status.md").read_text("utf-8")
    assert f"Version {version}, {'' if released else 'not '}released." in status
    for page in (README, DOCS / "index.md"):
        assert ("There is no release yet" in page.read_text("utf-8")) is not released, page
    project, setup = ((ROOT / name).read_text("utf-8") for name in ("pyproject.toml", "setup.py"))
    [python] = re.findall(r'^requires-python = ">=(.+)"$', project, re.MULTILINE)
    [torch] = re.findall(r"^OLDEST_TORCH = \((\d+), (\d+)\)$", setup, re.MULTILINE)
    for oldest in (f"Python {python} or newer", f"torch {'.'.join(torch)} or newer"):
        assert oldest in README.read_text("utf-8")


@pytest.mark.parametrize("page", [README, CONTRIBUTING, *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), path
        if anchor:
            assert anchor in anchors_of(target), f"{path}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """Ids that MkDocs gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", t).strip().lower()) for t in titles}


def test_every_public_name_is_in_the_api_reference() -> None:
    shown: list[Any] = []
    pages = [page.read_text(encoding="utf-8") for page in DOCS.glob("api*.md")]
    blocks = [part for text in pages for part in re.split(r"^::: ", text, flags=re.MULTILINE)[1:]]
    for block in blocks:
        path, names = block.split("\n")[0], re.findall(r"^ +members: \[(.+)\]$", block, re.M)
        if path in sys.modules:
            page = sys.modules[path]
            members = names[0].split(", ") if names else page.__all__
            shown += [page, *(getattr(page, name) for name in members)]
        elif ".GradScaler." not in path:
            module, _, name = path.rpartition(".")
            shown.append(getattr(import_module(module), name))
    public = [name for name in ampfast.__all__ if not name.startswith("_")]
    assert [name for name in public if getattr(ampfast, name) not in shown] == []


INTERNALS = (DOCS / "contributing/internals.md").read_text(encoding="utf-8")
NAMED = [
    (path, name)
    for path, names in re.findall(r"`([\w/]+\.\w+)`:((?:\s+`\w+`,?)+)", INTERNALS)
    for name in re.findall(r"`(\w+)`", names)
]


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda part: part)
def test_a_function_is_where_internals_say(path: str, name: str) -> None:
    # A definition begins a line, or follows attributes; methods are indented, in Python alone.
    is_python = path.endswith(".py")
    definition = (
        rf"^ *(?:def|class) {name}\b" if is_python else rf"^\w.*(?:\)\n +)?\b{name}(?:\(| \{{| : )"
    )
    assert re.search(definition, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


# Recipes against torch's scaler and torch's clipping: norms, parameters, scales


# First code block below a heading, after nothing but prose.
RECIPES = dict(
    re.findall(
        r"^##+ ([^\n]+)\n(?:(?![#`])[^\n]*\n)*```python\n(.*?)^```",
        (DOCS / "recipes.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)
# Calls of `scale` per iteration.
SCALED = {
    "Several losses of one model": 2,
    "Gradient accumulation": 4,
    "Gradient penalty": 3,
    "A GAN": 2,
}
ITERATIONS = 8
# The norms differ in their last bits, since torch sums in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}


class Torchs(TorchScaler):
    """torch's scaler with torch's clipping."""

    def clip_grad_norm_(self, optimizer: Any, max_norm: float) -> torch.Tensor:
        self.unscale_(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm)


def trained(
    recipe: str, kind: type[Any], bad: Sequence[int] = (), **arguments: Any
) -> tuple[Any, list[Any]]:
    """Scaler of a run, and its norms, parameters and states; `bad` calls get an infinite loss."""
    scalers: list[Any] = []
    norms: list[torch.Tensor] = []
    calls = itertools.count()

    def make(device: str) -> Any:
        scaler = kind(device, **arguments)
        scale, clip = scaler.scale, scaler.clip_grad_norm_

        def clipped(optimizer: Any, max_norm: float) -> torch.Tensor:
            norms.append(clip(optimizer, max_norm=max_norm).clone())
            return norms[-1]

        scaler.scale = lambda loss: scale(loss * torch.inf if next(calls) in bad else loss)
        scaler.clip_grad_norm_ = clipped
        scalers.append(scaler)
        return scaler

    source = RECIPES[recipe].replace("from ampfast import GradScaler\n", "")
    source = source.replace("for _ in range(3):", f"for _ in range({ITERATIONS}):")
    source = source.replace("dtype=torch.float16", "enabled=False")
    names: dict[str, Any] = {"GradScaler": make}
    torch.manual_seed(5)
    exec(source, names)
    assert next(calls) == SCALED[recipe] * ITERATIONS
    optimizers = [each for each in names.values() if isinstance(each, torch.optim.Optimizer)]
    assert len(norms) == len(optimizers) * ITERATIONS
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    params = [param.detach() for group in groups for param in group["params"]]
    states = [dict(state) for optimizer in optimizers for state in optimizer.state.values()]
    [scaler] = scalers
    # Of infinite gradients torch's may be NaN.
    return scaler, [torch.stack(norms).nan_to_num(nan=torch.inf), params, states]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("recipe", "which"), [(recipe, i) for recipe, calls in SCALED.items() for i in range(calls)]
)
def test_a_recipe_with_planted_overflows(recipe: str, which: int) -> None:
    """Overflows in each loss of an iteration in turn, also in the last one alone."""
    bad = [SCALED[recipe] * iteration + which for iteration in (1, 4, 5)]
    arguments = {"init_scale": 1024.0, "growth_interval": 2}
    ours, mine = trained(recipe, GradScaler, bad, **arguments)
    theirs, expected = trained(recipe, Torchs, bad, **arguments)
    torch.testing.assert_close(mine, expected, **CLOSE)
    assert ours.state_dict() == theirs.state_dict()
    assert (ours.stats().steps, ours.stats().skipped) == (ITERATIONS, 3)


@pytest.mark.sweep
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("recipe", SCALED)
def test_a_recipe_trains_as_without_scaling(recipe: str, enabled: bool) -> None:
    """Norms and penalties are those of the unscaled loss, at any scale."""
    _, mine = trained(recipe, GradScaler, init_scale=512.0, enabled=enabled)
    torch.testing.assert_close(mine, trained(recipe, Torchs, enabled=False)[1], **CLOSE)
