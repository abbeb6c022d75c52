"""Settings: their limits, what a cluster's file may say of them, and what a process makes of file and flags."""

from __future__ import annotations

import math
import stat
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from corun.cli import main
from corun.config.cluster_file import _TYPES, CONFIGS, ClusterSpec, PoolSpec, Security, _keys, path_settings, read, toml
from corun.config.fields import (
    DecodeConfig,
    HttpConfig,
    MemberConfig,
    NodeConfig,
    PrefillConfig,
    RouterConfig,
    TlsConfig,
    is_loopback,
)
from corun.config.flags import parse
from corun.errors import InvalidArgumentError
from corun.launch.members import command, members
from tests.secrets import Secrets

WHOLE = """
[pools.main]
model = "org/model"
dtype = "float32"
threads = 2

[pools.main.router]
port = 7001
audit_fraction = 1

[pools.main.prefill]
replicas = 2
chunk_size = 64
port = 7101

[pools.main.decode]
slots = 8
smaller_steps = false
threads = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.toml"


def spec(file: Path, text: str) -> ClusterSpec:
    file.write_text(text)
    found = read(file)
    found.check()
    return found


def test_a_file_gives_the_configs(file: Path) -> None:
    pool = spec(file, WHOLE).pool()
    assert pool.config("router") == RouterConfig(port=7001, audit_fraction=1)
    assert pool.config("prefill", node_id="p") == PrefillConfig(
        model="org/model", dtype="float32", threads=2, chunk_size=64, port=7101, node_id="p"
    )
    assert pool.config("decode") == DecodeConfig(
        model="org/model", dtype="float32", threads=1, slots=8, smaller_steps=False
    )
    assert [pool.count(role) for role in CONFIGS] == [1, 2, 1, 0]
    assert [pool.ports("prefill", index) for index in range(2)] == [{"port": 7101}, {"port": 7102}]
    assert (pool.ports("router", 1), pool.ports("decode", 5)) == ({"port": 7002}, {})
    assert spec(file, '[pools.a]\nmodel = "tiny"').pool("a").config("decode") == DecodeConfig(model="tiny")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slots = 8", "slot = 8", r"[pools.main.decode] slot = 8: is not a key here; the nearest is slots"),
        ("slots = 8", "slots = -1", r"[pools.main.decode] slots = -1: must be an integer in [0, 4096]"),
        ("slots = 8", 'slots = "8"', r"[pools.main.decode] slots = '8': must be an integer"),
        ("slots = 8", "slots = true", r"[pools.main.decode] slots = True: must be an integer"),
        ("smaller_steps = false", "smaller_steps = 0", r"[pools.main.decode] smaller_steps = 0: must be true or false"),
        ("slots = 8", "slots = {}", r"[pools.main.decode] slots = {}: must be an integer"),
        ("slots = 8", "replicas = 0", r"[pools.main.decode] replicas = 0: must be at least 1"),
        ("threads = 2", "threads = -1", r"[pools.main] threads = -1: must be an integer in [0"),
        ("threads = 2", "slots = 2", r"[pools.main] slots = 2: belongs in [pools.main.decode]"),
        ("slots = 8", 'model = "b"', r"[pools.main.decode] model = 'b': belongs in [pools.main]"),
        ("slots = 8", 'node_id = "b"', r"[pools.main.decode] node_id = 'b': is for whoever starts the process"),
        ("slots = 8", 'tls_ca = "b"', r"[pools.main.decode] tls_ca = 'b': belongs in [security]"),
        ("port = 7001", "port = 70000", r"[pools.main.router] port = 70000: must be an integer in [0, 65535]"),
        ("port = 7001", "port = 7102", r"[pools.main.prefill] port = 7101: must leave 7102 to"),
        ("port = 7101", "port = 65535", r"[pools.main.prefill] port = 65536: must be an integer in"),
        ("port = 7001", 'host = "0.0.0.0"', r"host = '0.0.0.0': is a public address, so [security] needs tls_cert"),
        ('model = "org/model"', "", r"[pools.main] model = '': must be given"),
        ('model = "org/model"', 'model = ""', r"[pools.main] model = '': must not be empty"),
        ('model = "org/model"', "model = 1", r"[pools.main] model = 1: must be text"),
        ("[pools.main.decode]", "[pools.main.decoder]", r"[pools.main] decoder = a table: is not a key here"),
        ("[pools.main.decode]", "[pools.main.deocde]", r"deocde = a table: is not a key here; the nearest is decode"),
        ("[pools.main.decode]", "[pool.main.decode]", r"cluster.toml: pool = a table: is not a key here; the nearest"),
        ("[pools.main]", "[security]\ntls_cert = 'x'\n[pools.main]", "[security] tls_key = '': must be given"),
        ("[pools.main]", "[security]\ninsecure = 1\n[pools.main]", "[security] insecure = 1: must be true or false"),
        ("[pools.main]", "[security]\nslots = 1\n[pools.main]", "[security] slots = 1: belongs in [pools.NAME.decode]"),
        ("[pools.main]", '[pools."a b"]\nmodel = "m"\n[pools.main]', "must be called with up to 63"),
    ],
)
def test_what_is_wrong_says_where(file: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        spec(file, WHOLE.replace(old, new, 1))
    assert message in str(caught.value)
    assert "cluster.toml" in str(caught.value)


DEEP = pytest.param("port = " + "[" * 5000, id="deep")


@pytest.mark.parametrize("text", ["port = ", DEEP, "", "[security]", "[pools]", "pools = 1", "[pools]\nmain = 1"])
def test_a_file_needs_a_pool(file: Path, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cluster\.toml: |must be a readable TOML file: (Invalid|maximum)"):
        spec(file, text)


def test_a_file_holds_no_secret(file: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="use seed_key_file") as caught:
        spec(file, WHOLE.replace("port = 7001", 'seed_key = "c0ffee"'))
    assert "c0ffee" not in str(caught.value)


def test_paths_are_relative_to_the_file(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Secrets.make(tmp_path / "secrets")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").touch()
    (tmp_path / "audits").mkdir()
    (tmp_path / "seed.key").write_text("00" * 8)
    names = {"tls_cert": "member.pem", "tls_key": "member.key", "tls_ca": "ca.pem"}
    names |= {"cluster_token_file": "cluster.token", "client_tokens_file": "clients.tokens"}
    security = "\n".join(f'{key} = "secrets/{name}"' for key, name in names.items())
    monkeypatch.chdir("/")
    found = spec(
        file,
        f'[security]\n{security}\n[pools.main]\nmodel = "weights"\n[pools.main.router]\nhost = "0.0.0.0"\n'
        'audit_dir = "audits"\nseed_key_file = "seed.key"',
    )
    router = found.pool().config("router")
    assert (router.tls_cert, router.audit_dir) == (str(tmp_path / "secrets/member.pem"), str(tmp_path / "audits"))
    assert router.seed_key_bytes == b"\0" * 8
    decode = found.pool().config("decode")
    assert (decode.model, decode.tls_ca) == (str(tmp_path / "weights"), str(tmp_path / "secrets/ca.pem"))
    assert found.security.cluster_token() == decode.cluster_token()


def test_the_home_of_nobody_is_no_path_to_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--check", "--model", "~nobody-of-this-name/m"]) == 2
    assert "/~nobody-of-this-name/m': must be 'tiny', 'smollm2', a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(PrefillConfig, ["--model", "~nobody-of-this-name/m"])
    assert "model = '~nobody-of-this-name/m': must be 'tiny', 'smollm2', a directory" in capsys.readouterr().err


def test_every_path_is_known() -> None:
    names = {known.name for cls in (*CONFIGS.values(), HttpConfig) for known in fields(cls)}
    like_a_path = {name for name in names if name.endswith(("_file", "_dir", "_cert", "_key", "_ca"))}
    assert like_a_path - {"seed_key"} == path_settings()


def test_every_setting_has_a_type_that_a_file_can_give() -> None:
    for types in _keys().values():
        assert {name for name, hint in types.items() if hint not in _TYPES} == set()


def test_every_setting_is_checked_or_may_be_anything() -> None:
    unchecked = {known.name for cls in CONFIGS.values() for known in fields(cls) if "check" not in known.metadata}
    freedoms = {"smaller_steps", "packed_prefill", "free_chunks", "prefix_caching", "mixed_steps"}
    assert unchecked - path_settings() == {
        "tls_name",
        "tls_clients",
        "reflection",
        "share_kv",
        "keep_certificates",
        *freedoms,
    }


def test_a_link_stays_a_link(tmp_path: Path, file: Path) -> None:
    """A mounted secret is one: its renewal changes where it leads."""
    (tmp_path / "old").mkdir()
    (tmp_path / "now").symlink_to("old")
    (tmp_path / "old" / "seed.key").write_text("00" * 8)
    (tmp_path / "seed.key").symlink_to("now/seed.key")
    found = spec(file, '[pools.main]\nmodel = "m"\n[pools.main.router]\nseed_key_file = "seed.key"')
    assert found.pool().config("router").seed_key_file == str(tmp_path / "seed.key")


def test_making_a_config_reads_no_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("tls_cert", "tls_key", "tls_ca", "cluster_token_file", "client_tokens_file")
    pool = spec(file, "[security]\n" + "\n".join(f"{name} = '/none/{name}'" for name in names) + WHOLE).pool()
    for role in CONFIGS:
        with pytest.raises(InvalidArgumentError, match=r"cluster\.toml: \[security\] tls_cert = .*readable file"):
            pool.check_files(role)
    with pytest.raises(SystemExit):
        parse(RouterConfig, ["--config", str(file)])
    assert "cluster.toml: [security] tls_cert = " in capsys.readouterr().err
    for name, value, limit in (
        ("audit_dir", "/none", "must be a directory"),
        ("audit_dir", "/dev/null", "must be a directory"),
        ("seed_key_file", "/none", "No such file"),
    ):
        values: dict[str, Any] = {name: value}
        config = RouterConfig(**values)
        with pytest.raises(InvalidArgumentError, match=f"{name} = '{value}': .*{limit}"):
            config.check_files()


def test_a_pool_survives_its_way_through_a_file(file: Path) -> None:
    pool = PoolSpec(
        name="a-b_1",
        common={"model": 'o\\"rg/m\u00f6\n\x7fdel', "threads": 2, "nixl_port": 7, "drain_grace_s": 1e-05},
        router={"audit_fraction": 1, "share_kv": False, "metrics_port": 0, "audit_dir": "/x"},
        decode={"slots": 8},
        replicas={"decode": 3},
        nodes_per_gpu=2,
        security=Security(tls_ca="/ca.pem", insecure=True),
    )
    both = replace(pool, colocated={"slots": 8}, replicas={"colocated": 2, "decode": 1})
    served = replace(pool, gateway={"port": 0, "https_cert": "/x.pem"})
    for each in (pool, PoolSpec(common={"model": "m"}), both, served, replace(pool, gateway={})):
        file.write_text(toml(each), encoding="utf-8")
        found = read(file).pool()
        assert replace(found, source="", replicas=each.replicas) == each
        assert [found.count(role) for role in CONFIGS] == [each.count(role) for role in CONFIGS]


def test_the_port_that_was_given_gives_way_to_the_default() -> None:
    pool = PoolSpec(common={"model": "m"}, router={"metrics_port": RouterConfig().port})
    with pytest.raises(InvalidArgumentError, match="metrics_port = 50051: must leave 50051 to port, or be 0"):
        ClusterSpec(pools=(pool,)).check()


def test_two_pools_share_no_port(file: Path) -> None:
    two = '[pools.a]\nmodel = "m"\n[pools.b]\nmodel = "m"\n'
    with pytest.raises(InvalidArgumentError, match=r"\[pools.b.router\] port = 50051: must leave 50051 to .*pools.a"):
        spec(file, two)
    found = spec(file, f"{two}[pools.b.router]\nport = 50052")
    assert [pool.name for pool in found.pools] == ["a", "b"]
    with pytest.raises(InvalidArgumentError, match="pool = '': must be one of a, b"):
        found.pool()
    with pytest.raises(InvalidArgumentError, match="pool = 'c': must be one of a, b"):
        found.pool("c")


def test_a_pool_may_have_a_gateway(file: Path) -> None:
    def of(words: str) -> ClusterSpec:
        found = spec(file, f'[pools.main]\nmodel = "m"\n{words}')
        found.check()
        return found

    assert of("").pool().http() is None
    assert of("[pools.main.gateway]").pool().http() == HttpConfig()
    found = of('[pools.main.gateway]\nhttps_cert = "x.pem"\nport = 0')
    assert found.pool().http() == HttpConfig(https_cert=str(file.parent / "x.pem"), port=0)
    with pytest.raises(InvalidArgumentError, match=r"\[pools.main.gateway\] https_key = '': must be given"):
        found.check_files()
    for words, error in (
        ("prot = 1", r"\[pools.main.gateway\] prot = 1: is not a key here; the nearest is port"),
        ('port = "a"', r"\[pools.main.gateway\] port = 'a': must be an integer"),
        ("port = 70000", r"\[pools.main.gateway\] port = 70000: must be an integer in"),
        ("port = 50051", r"\[pools.main.gateway\] port = 50051: must leave 50051 to .*router"),
        ('host = "0.0.0.0"', r"\[pools.main.gateway\] host = '0.0.0.0': is a public address"),
        ("replicas = 2", r"\[pools.main.gateway\] replicas = 2: belongs in|is not a key here"),
    ):
        with pytest.raises(InvalidArgumentError, match=error):
            of(f"[pools.main.gateway]\n{words}")
    of('[security]\ninsecure = true\n[pools.main.gateway]\nhost = "0.0.0.0"')
    two = '[pools.a]\nmodel = "m"\n[pools.a.gateway]\n[pools.b]\nmodel = "m"\n[pools.b.router]\nport = 1\n'
    with pytest.raises(InvalidArgumentError, match=r"\[pools.b.gateway\] port = 8000: must leave 8000 to .*pools.a.ga"):
        spec(file, f"{two}[pools.b.gateway]").check()


def test_nodes_per_gpu(file: Path) -> None:
    def of(words: str) -> PoolSpec:
        found = spec(file, f'[pools.main]\nmodel = "m"\n{words}').pool()
        found.check()
        return found

    assert of("").nodes_per_gpu is None
    assert of("nodes_per_gpu = 3").nodes_per_gpu == 3
    for value in ("0", "33", "true", "1.0", '"2"'):
        with pytest.raises(
            InvalidArgumentError, match=r"\[pools.main\] nodes_per_gpu = .* must be (an integer|at least 1)"
        ):
            of(f"nodes_per_gpu = {value}")
    for words in ("nodes_per_gpu = 33", "[pools.main.decode]\nreplicas = 0", "[pools.main.router]\nreplicas = 1025"):
        with pytest.raises(InvalidArgumentError, match="must be at least 1 and at most"):  # A process reads only.
            spec(file, f'[pools.main]\nmodel = "m"\n{words}')
    with pytest.raises(InvalidArgumentError, match=r"\[pools.main\] nodes_per_gpu = 2: must be left out: .* 4 GPUs"):
        of("nodes_per_gpu = 2\ntensor_parallel_size = 4")
    with pytest.raises(InvalidArgumentError, match=r"\[pools.main.decode\] nodes_per_gpu = 2: belongs in"):
        of("[pools.main.decode]\nnodes_per_gpu = 2")


def test_scaled(file: Path) -> None:
    found = spec(file, WHOLE)
    more = found.scaled("", {"prefill": 3, "decode": 2})
    assert [more.pool().count(role) for role in CONFIGS] == [1, 3, 2, 0]
    assert found.pool().count("prefill") == 2
    for counts in ({"prefill": 0}, {"decode": -1}, {"decode": 10_000}):
        with pytest.raises(InvalidArgumentError, match="replicas"):
            found.scaled("main", counts)


@pytest.mark.parametrize(
    ("tables", "counts"),
    [
        ("", [1, 1, 1, 0]),
        ("[pools.a.prefill]\nreplicas = 3", [1, 3, 1, 0]),
        ("[pools.a.colocated]", [1, 0, 0, 1]),
        ("[pools.a.colocated]\nslots = 8\nchunk_size = 64\nreplicas = 2", [1, 0, 0, 2]),
        ("[pools.a.colocated]\n[pools.a.decode]\nslots = 8", [1, 0, 1, 1]),
        ("[pools.a.colocated]\nreplicas = 0", [1, 1, 1, 0]),
    ],
)
def test_a_pool_has_a_pair_or_colocated_nodes_or_what_its_tables_say(
    file: Path, tables: str, counts: list[int]
) -> None:
    found = spec(file, f'[pools.a]\nmodel = "m"\n{tables}').pool()
    assert [found.count(role) for role in CONFIGS] == counts


def test_a_pool_needs_both_sides(file: Path) -> None:
    one = spec(file, '[pools.a]\nmodel = "m"\n[pools.a.colocated]')
    both = one.scaled("", {"prefill": 1, "decode": 1})
    assert [both.scaled("", {"colocated": 0}).pool().count(role) for role in CONFIGS] == [1, 1, 1, 0]
    for counts, name in (({"colocated": 0}, "prefill"), ({"colocated": 0, "prefill": 2}, "decode")):
        with pytest.raises(
            InvalidArgumentError, match=rf"pools.a.{name}\] replicas = 0: must be at least 1 .* colocated"
        ):
            one.scaled("", counts)


def test_values_of_a_command_line_are_called_as_there() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"decode": {"slots": -1}}, "slots"),
        ({"router": {"port": 65536}}, "port"),
        ({"prefill": {"chunk_size": 0}}, "chunk_size"),
        ({"replicas": {"prefill": 0}}, "prefill"),
    ]
    for values, field in bad:
        with pytest.raises(InvalidArgumentError) as caught:
            PoolSpec(common={"model": "m"}, **values).check()
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("cls", "name", "values"),
    [
        (RouterConfig, "host", [""]),
        (RouterConfig, "port", [-1, 65536, True, "80"]),
        (RouterConfig, "router_id", ["a b", "é", "x" * 129]),
        (RouterConfig, "seed_key", ["xyz", "abc", "00" * 65]),
        (RouterConfig, "max_queued_samples", [0, -1, 1.5]),
        (RouterConfig, "max_queue_wait_s", [-1, float("inf"), True]),
        (RouterConfig, "heartbeat_interval_ms", [0]),
        (RouterConfig, "heartbeat_timeout_ms", [1999]),
        (RouterConfig, "reserve_timeout_s", [0, -1, math.nan, math.inf, "5"]),
        (RouterConfig, "node_wait_s", [-1, 1e9]),
        (RouterConfig, "max_message_bytes", [0, 1023, 2**29 + 1]),
        (RouterConfig, "audit_fraction", [-0.1, 1.1, math.nan, True, "1"]),
        (NodeConfig, "model", [""]),
        (NodeConfig, "router", [(), ("host",), ("host:0",), ("host:99999",), (":50051",), ("host:x",)]),
        (NodeConfig, "advertise", ["host", "host:0"]),
        (NodeConfig, "node_id", ["a/b"]),
        (NodeConfig, "gpu_memory_utilization", [0, 1.1, math.nan]),
        (NodeConfig, "engine_restart_s", [0, 5.0]),
        (NodeConfig, "metrics_port", [-1, 65536]),
        (PrefillConfig, "chunk_size", [0]),
        (DecodeConfig, "slots", [-1, 4097]),
        (DecodeConfig, "decode_split", ["", "own_length", "2048"]),
    ],
)
def test_limits(cls: type[MemberConfig], name: str, values: list[Any]) -> None:
    """One setting of each kind, and those with limits of their own. Another test looks that each has a check."""
    model = {} if cls is RouterConfig else {"model": "m"}
    for value in values:
        with pytest.raises(InvalidArgumentError, match=r"must be|must not") as caught:
            cls(**{**model, name: value})
        assert caught.value.field == name


def test_what_is_valid() -> None:
    assert RouterConfig(seed_key="00ff").seed_key_bytes == b"\x00\xff"
    assert NodeConfig(model="m", router=("[::1]:50051",)).router == ("[::1]:50051",)
    assert NodeConfig(model="m", advertise="proxy:1").advertise == "proxy:1"


def test_flags_give_a_config() -> None:
    config = parse(DecodeConfig, ["--model", "m", "--slots", "8", "--router", "a:1", "b:2"])
    assert config == DecodeConfig(model="m", slots=8, router=("a:1", "b:2"))
    assert parse(RouterConfig, []) == RouterConfig()
    assert parse(RouterConfig, ["--metrics-port", "9"]) == RouterConfig(metrics_port=9)


def test_values_of_the_file_are_defaults(file: Path) -> None:
    file.write_text(WHOLE)
    assert parse(RouterConfig, ["--config", str(file), "--port", "1"]) == RouterConfig(port=1, audit_fraction=1)
    argv = [f"--config={file}", "--pool", "main", "--router", "r:1", "--threads", "7", "--smaller-steps"]
    assert parse(DecodeConfig, argv) == DecodeConfig(
        model="org/model", dtype="float32", threads=7, slots=8, router=("r:1",)
    )


def test_secrets_of_others_need_not_be_there(tmp_path: Path, file: Path) -> None:
    (tmp_path / "cluster.token").write_text("t" * 32)
    names = 'cluster_token_file = "cluster.token"\nclient_tokens_file = "clients.tokens"'
    file.write_text(f"[security]\n{names}\n{WHOLE}")
    assert parse(PrefillConfig, ["--config", str(file)]).cluster_token() == "t" * 32


@pytest.mark.parametrize(
    ("cls", "flags", "message"),
    [
        (DecodeConfig, "--model m --slots -1", "prog: slots = -1: must be an integer in [0, 4096]"),
        (DecodeConfig, "--model m --slots many", "--slots"),
        (DecodeConfig, "--model m --bogus 1", "--bogus"),
        (DecodeConfig, "", "--model"),
        (DecodeConfig, "--model /none", "prog: model = '/none': must be 'tiny', 'smollm2', a directory with a config"),
        (DecodeConfig, "--config FILE --pool x", "prog: pool = 'x': must be one of main"),
        (DecodeConfig, "--pool x", "must come with --config"),
        (DecodeConfig, "--config /none", "config = '/none': must be a readable TOML file: No such file"),
        (DecodeConfig, "--config FILE --slots -1", "prog: slots = -1: must be an integer"),
        (RouterConfig, "--config FILE --seed-key c0ffee", "use seed_key_file"),
        (RouterConfig, "--seed-key=c0ffee", "use seed_key_file"),
        (RouterConfig, "--seed_key c0ffee", "use seed_key_file"),
        (RouterConfig, "--config", "--config: expected one argument"),
    ],
)
def test_usage_errors(cls: type[Any], flags: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(WHOLE)
    with pytest.raises(SystemExit) as caught:
        parse(cls, flags.replace("FILE", str(file)).split(), prog="prog")
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "c0ffee" not in shown


def test_all_of_tls_or_none(secrets: Secrets) -> None:
    with pytest.raises(InvalidArgumentError, match="TLS between members needs"):
        RouterConfig(tls_cert=secrets.path("member.pem"), tls_key=secrets.path("member.key"))
    with pytest.raises(InvalidArgumentError, match="tls_clients"):
        RouterConfig(tls_clients=True)
    with pytest.raises(InvalidArgumentError, match="every client may act as a node"):
        RouterConfig(client_tokens_file=secrets.path("clients.tokens"))
    with pytest.raises(InvalidArgumentError, match="PEM file"):
        TlsConfig(ca=secrets.path("cluster.token"))
    with pytest.raises(InvalidArgumentError, match="readable file"):
        TlsConfig(ca=secrets.path("none.pem"))
    with pytest.raises(InvalidArgumentError, match="both, or neither"):
        TlsConfig(cert=secrets.path("member.pem"))


def test_neither_values_nor_errors_show_a_secret(secrets: Secrets, tmp_path: Path) -> None:
    config = RouterConfig(**secrets.settings)
    shown = f"{config!r} {secrets.member!r} {secrets.client!r}"
    assert not [text for text in secrets.texts if text in shown]
    assert "c0ffee" not in repr(RouterConfig(seed_key="c0ffee"))
    with pytest.raises(InvalidArgumentError, match="6 characters") as caught:
        RouterConfig(seed_key="secret")
    assert "secret" not in str(caught.value)
    path = tmp_path / "key"
    path.write_text("not-hexadecimal-at-all")
    with pytest.raises(InvalidArgumentError, match="hexadecimal") as caught:
        RouterConfig(seed_key_file=str(path)).check_files()
    assert "not-hex" not in str(caught.value)
    assert len(parse(RouterConfig, ["--seed-key-file", secrets.path("seed.key")]).seed_key_bytes) == 32


def test_what_up_starts_gets_paths_only(secrets: Secrets, tmp_path: Path) -> None:
    security = Security(**secrets.settings, tls_clients=True)
    pool = PoolSpec(common={"model": "m"}, router={"host": "0.0.0.0"}, security=security)
    first, *nodes = members(ClusterSpec(pools=(pool,)))
    file = tmp_path / "cluster.toml"
    file.write_text(toml(pool))
    assert not [text for text in secrets.texts if text in file.read_text()]
    router = command(pool, first, file=file, host="")
    assert parse(RouterConfig, router[3:]) == RouterConfig(host="0.0.0.0", tls_clients=True, **secrets.settings)
    for node, config in zip(nodes, (PrefillConfig, DecodeConfig), strict=True):
        argv = command(pool, node, file=file, routers=("10.0.0.1:1",), host="10.0.0.2")
        assert parse(config, argv[3:]).cluster_token_file == secrets.path("cluster.token")
        assert not [text for text in secrets.texts if text in " ".join(argv)]


def test_part_of_it_is_not_enough(secrets: Secrets) -> None:
    def check(**security: Any) -> None:
        PoolSpec(common={"model": "m"}, router={"host": "0.0.0.0"}, security=Security(**security)).check()

    for missing in ("tls_ca", "client_tokens_file", "cluster_token_file"):
        with pytest.raises(InvalidArgumentError, match=f"needs --{missing.replace('_', '-')} as well"):
            check(**{**secrets.settings, missing: ""})
    check(**secrets.settings)
    check(insecure=True)
    PoolSpec(common={"model": "m"}).check()


def test_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.0.2.1", "localhost.example.org"))


@pytest.mark.parametrize("host", ["", "bücher.example", "localhost,10.0.0.7", "10.0.0.7:50051", "[::1]"])
def test_certs_for_what_is_no_host_are_refused_before_a_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    assert main(["certs", str(tmp_path), "--hosts", "*.corun_1", host]) == 2
    assert f"hosts = {host!r}: must be an address, or a name" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_certs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "new"
    assert main(["certs", str(directory), "--hosts", "10.0.0.7", "r.example.org"]) == 0
    written = capsys.readouterr().out.split()
    assert sorted(written) == sorted(str(path) for path in directory.iterdir())
    secret = [path for path in directory.iterdir() if path.suffix in {".key", ".token", ".tokens"}]
    assert len(secret) == 7
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
    assert main(["certs", str(directory)]) == 2
    assert "must not hold ca.pem already" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_certs_beside_a_file_of_others_are_refused_before_a_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also beside a link to nowhere. A new authority beside an old key would serve nobody."""
    (tmp_path / "seed.key").symlink_to(tmp_path / "gone")
    assert main(["certs", str(tmp_path)]) == 2
    assert "must not hold seed.key already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["seed.key"]
