"""The pages are right: cluster files and commands can be run, alerts are explained, and links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from corun import cli
from corun.cli import issue_certs
from corun.config import cluster_file
from corun.config.cluster_file import CONFIGS
from corun.config.fields import MemberConfig
from corun.config.flags import parse
from corun.errors import InvalidArgumentError
from corun.launch.members import MODULES

ROOT = Path(__file__).parents[2]
DEPLOY, README, K8S = "docs/deploy.md", "README.md", "k8s/README.md"
TUTORIAL, COMMANDS = "docs/tutorial.md", "docs/commands.md"
PROJECT = [f"{name}.md" for name in ("CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY")]
PAGES = [README, K8S, *PROJECT, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
ALERTS = ROOT / "k8s" / "components" / "monitoring" / "alerts.yaml"
PROCESSES: dict[str, type[MemberConfig]] = {MODULES[role]: config for role, config in CONFIGS.items()}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the contents of the fenced blocks of one language; with "", of those that name none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [content for name, content in found if name == language]


def cluster_files(text: str) -> list[str]:
    return [block for block in blocks(text, "toml") if "[pools." in block]


def typed(text: str) -> str:
    """Return what a reader types: plain blocks, and what follows the prompt of captures, but for wrong usage."""
    captures = (block for block in blocks(text, "console") if "\n$ echo $?\n2\n" not in block)
    plain, shown = (re.sub(r"\\\n\s*", "", "".join(found)) for found in (blocks(text, ""), captures))
    return plain + "\n".join(line[2:] for line in shown.splitlines() if line.startswith("$ "))


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command line of ours, without variables before it and comments after it."""
    for line in typed(text).splitlines():
        if found := re.fullmatch(
            r"(?:[A-Z_]+=\S+ )*((?:corun|python -m (?:router|prefill_node|decode_node|colocated_node))(?: .*)?)", line
        ):
            command = re.sub(r"\s+#.*", "", found[1])
            if "  " not in command:  # Columns are what a command printed.
                yield shlex.split(re.sub(r" [<>&].*", "", command))


def take(words: list[str]) -> None:
    """Parse a command line as the program does. Raises SystemExit if it is wrong."""
    if words[0] == "corun":
        cli.parse(words[1:])
    else:
        # The reader's /models is in the working directory.
        parse(PROCESSES[words[2]], [word.replace("/models/", "models/") for word in words[3:]])


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader who has done all that the page says: secrets, a model, the cluster file."""
    issue_certs.make(tmp_path / "secrets", ["corun"])
    model = tmp_path / "models" / "Qwen3-8B"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (example,) = cluster_files(text_of(DEPLOY))
    (tmp_path / "cluster.toml").write_text(example.replace('"/models/', f'"{tmp_path}/models/'))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(directory: Path, text: str) -> None:
    file = directory / "example.toml"
    file.write_text(text)
    found = cluster_file.read(file)
    found.check()
    found.check_files()


@pytest.mark.parametrize("page", [DEPLOY, TUTORIAL])
def test_cluster_files_can_be_run(host: Path, page: str) -> None:
    examples = cluster_files(text_of(page))
    assert examples
    for example in examples:
        check(host, example)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slots =", "slot =", r"\[pools.main.decode\] slot.*the nearest is slots"),
        ("metrics_port = 9110", "metrics_port = 9101", "must leave 9101"),
        ('client_tokens_file = "secrets/clients.tokens"', "", "needs client_tokens_file"),
        ("secrets/member.pem", "secrets/other.pem", "tls_cert.*must be a readable file"),
    ],
)
def test_a_wrong_cluster_file_is_seen(host: Path, old: str, new: str, message: str) -> None:
    (example,) = cluster_files(text_of(DEPLOY))
    assert old in example
    with pytest.raises(InvalidArgumentError, match=message):
        check(host, example.replace(old, new))


LEAST = {DEPLOY: 25, K8S: 3, README: 8, TUTORIAL: 14, COMMANDS: 14}
"""How many commands are found on a page at least: fewer would mean that the test no longer sees them."""


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(host: Path, page: str) -> None:
    found = list(commands(text_of(page)))
    assert len(found) >= LEAST.get(page, 0)
    for words in found:
        take(words)


def test_every_command_is_on_the_page_of_commands() -> None:
    heads = re.findall(r"^## corun (\w+)$", text_of(COMMANDS), flags=re.MULTILINE)
    assert sorted(heads) == sorted({name.split()[0] for name in cli.commands()})


@pytest.mark.parametrize(
    "line",
    [
        "corun up --slot-count 3",
        "corun status --router",
        "python -m router --slots 3",
        "A=1 B=2 python -m decode_node --model m --slots many  # comment",
        "corun certs \\\n    --host here",
    ],
)
def test_a_wrong_command_is_seen(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = commands(f"```\n{line}\n```\n")
    with pytest.raises(SystemExit) as ended:
        take(words)
    assert ended.value.code == 2, capsys.readouterr()


def test_what_is_a_command() -> None:
    plain = "A=1 corun up --port 1 \\\n  --host h   # why\nkubectl get\ncorun/  a folder\ncorun a > b\n"
    plain += "corun top  router-a  at 1\n"
    text = f"corun x\n```\n{plain}```\n```toml\ncorun c\n```\n"
    assert list(commands(text)) == [["corun", "up", "--port", "1", "--host", "h"], ["corun", "a"]]
    captures = "```console\n$ corun a b\ncorun c\n```\n```console\n$ corun wrong\n$ echo $?\n2\n```\n"
    assert list(commands(captures)) == [["corun", "a", "b"]]


def test_every_alert_is_explained_and_no_other() -> None:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["spec"]["groups"]
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    said = {name: f"{rule['labels']['severity']}, {rule.get('for', 'at once')}" for name, rule in rules.items()}
    rows = re.findall(r"^\| `(Corun\w+)` \| ([^|]+) \|", text_of(DEPLOY), flags=re.MULTILINE)
    assert dict(rows) == said
    assert set(re.findall(r"\bCorun[A-Z]\w+", text_of(DEPLOY))) == rules.keys()


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(page: str, text: str) -> list[str]:
    """Return the links to files or headings that do not exist."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert broken_links(page, text_of(page)) == []


def test_broken_links_are_seen() -> None:
    text = "[a](settings.md) [b](gone.md) [c](#alerts) [d](#gone) [e](../k8s/README.md#gpus) [f](../README.md#gone)"
    assert broken_links(DEPLOY, text) == ["gone.md", "#gone", "../README.md#gone"]
