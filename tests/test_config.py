"""The configuration: where it is found, what wins, what is refused."""

from pathlib import Path

import pytest
from msgspec.structs import fields

from batchmill import config
from batchmill.config import Config, InputLimits, ModelEntry, checks, entries
from batchmill.errors import InvalidConfig
from batchmill.types import Limits, Price
from batchmill.types.isolation import FunctionsEntry

DOCS = Path(__file__).parent.parent / "docs" / "configuration.md"


def load(folder: Path, text: str | None = None, environ: dict[str, str] | None = None, **flags) -> Config:
    if text is not None:
        (folder / "batchmill.toml").write_text(text)
    return config.load(environ={"HOME": str(folder), **(environ or {})}, cwd=folder, **flags)


def test_the_key_file_lies_where_it_is_said(tmp_path):
    """The file that secrets are encrypted with is the environment's, else the file's, else in the data directory."""
    text = '[secrets]\nkey_file = "keys/own.key"'
    environ = {"BATCHMILL_SECRETS_KEY_FILE": "/run/keys/ours"}
    assert load(tmp_path, text, environ).secrets_key == Path("/run/keys/ours")
    assert load(tmp_path, text).secrets_key == tmp_path / "keys/own.key"
    found = load(tmp_path, "", data_dir="there")
    assert found.secrets_key == tmp_path / "there/secrets.key"
    with pytest.raises(InvalidConfig, match=r"did you mean secrets\.key_file"):
        load(tmp_path, '[secrets]\nkeyfile = "x"')


def test_without_a_file_the_defaults_hold(tmp_path):
    """With nothing told, data lies in the user's data folder and there are no models."""
    found = load(tmp_path)
    assert found.data_dir == tmp_path / ".local/share/batchmill"
    assert found.file is None and found.models == {} and found.base == tmp_path
    assert load(tmp_path, environ={"XDG_DATA_HOME": f"{tmp_path}/x"}).data_dir == tmp_path / "x/batchmill"
    assert load(tmp_path, environ={"XDG_DATA_HOME": "rel"}).data_dir == tmp_path / ".local/share/batchmill"


def test_flags_win_over_environment_over_file(tmp_path):
    """The data directory comes from the flag, else the environment, else the file."""
    text = 'data_dir = "from-file"'
    environ = {"BATCHMILL_DATA_DIR": "from-environment"}
    assert load(tmp_path, text, environ, data_dir="from-flag").data_dir == tmp_path / "from-flag"
    assert load(tmp_path, text, environ).data_dir == tmp_path / "from-environment"
    assert load(tmp_path, text).data_dir == tmp_path / "from-file"


def test_the_file_is_named_by_flag_or_environment(tmp_path):
    """`--config` wins over BATCHMILL_CONFIG, that over the file in the working directory; paths are its own."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "c.toml").write_text('data_dir = "here"')
    environ = {"BATCHMILL_CONFIG": "a/c.toml"}
    assert load(tmp_path, "x_y = 1", environ).data_dir == tmp_path / "a/here"
    found = load(tmp_path, None, environ, config_file="b/c.toml")
    assert found.data_dir == tmp_path / "b/here" and found.base == tmp_path / "b"
    with pytest.raises(InvalidConfig, match="gone.toml cannot be read"):
        load(tmp_path, None, environ, config_file="gone.toml")


def test_models_are_read(tmp_path):
    """A model's table arrives whole, with numbers as what they are."""
    found = load(
        tmp_path,
        '[models.tiny]\nengine = "vllm"\nsource = "t"\nadapters = { upper = "u" }\nreplicas = 2\n'
        "engine_args = { max-model-len = 2048, enforce-eager = true }\nprice = { input = 1, output = 0.5 }\n"
        "limits = { in_flight_max = 7 }\n[limits]\ndepth_max = 9",
    )
    assert found.models["tiny"] == ModelEntry(
        engine="vllm",
        source="t",
        adapters={"upper": "u"},
        engine_args={"max-model-len": 2048, "enforce-eager": True},
        workers=2,
        price=Price(input=1.0, output=0.5),
        limits=Limits(in_flight_max=7),
    )
    assert found.limits.depth_max == 9
    assert found.limits.line_bytes_max == 16 * 1024 * 1024


MODEL = '[models.m]\nengine = "vllm"\nsource = "s"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data_dri = 'x'", "no key data_dri; did you mean data_dir?"),
        ("[limits]\nlines = 1", "no key limits.lines"),
        (MODEL + "adapter = {}", "no key models.m.adapter; did you mean models.m.adapters?"),
        (MODEL + "price = { inputs = 1 }", "models.m.price.inputs; did you mean models.m.price.input?"),
        (MODEL + "limits = { in_flight = 1 }", "did you mean models.m.limits.in_flight_max?"),
        (MODEL + "workers = 0", "models.m.workers must be 1 to 1024"),
        (MODEL + "workers = 1025", "models.m.workers must be 1 to 1024"),
        (MODEL + "workers = 2\nreplicas = 2", "two names of one number"),
        (MODEL + "price = { input = -1 }", "price.input must be 0 or more"),
        (MODEL + "price = -0.5", "price.input must be 0 or more"),
        (MODEL + "price = true", "price"),
        (MODEL + "price = { input = nan }", "price.input must be 0 or more"),
        (MODEL + "limits = { requests_per_minute = 0 }", "requests_per_minute must be more than 0"),
        ("[limits]\ndepth_max = 0", "limits.depth_max must be more than 0"),
        ('[models.m]\nsource = "vllm"', "missing required field `engine`"),
        ("[models]\nm = 3", "Expected `object`"),
        ("models = 3", "Expected `object`"),
        (MODEL.replace("models.m", 'models."a:b"'), "a model's name"),
        ("data_dir = 3", r"Expected `str \| null`, got `int` - at `\$.data_dir`"),
        ("= 3", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, expected):
    """An unknown key, a wrong type and a value out of range are refused by name, with the nearest known name."""
    with pytest.raises(InvalidConfig, match=expected) as refused:
        load(tmp_path, text)
    assert "batchmill.toml" in refused.value.message


@pytest.mark.parametrize(
    "place", ["h/x;password=s3cret", "u:s3cret@h/x", "h/x?a=1&Password=s3cret", "h;s3cret/x", "h/x=s3cret"]
)
def test_the_password_of_a_database_is_never_shown(tmp_path, place):
    """A password in the URL, and parameters in the place of the name, are refused without repeating them."""
    with pytest.raises(InvalidConfig, match="database.url h") as raised:
        load(tmp_path, f'[database]\nurl = "postgresql+psycopg://{place}"')
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("name", config.LIMITS_MAX)
def test_every_limit_has_a_largest_value(tmp_path, name):
    """A limit at its maximum is taken, and beyond it, infinite or not a number it is refused by name."""
    most = config.LIMITS_MAX[name]
    of_input = name in [each.name for each in fields(InputLimits)]
    text = "[limits]\n%s = %s" if of_input else MODEL + "limits = { %s = %s }"
    found = load(tmp_path, text % (name, most))
    assert getattr(found.limits if of_input else found.models["m"].limits, name) == most
    beyond = [most + 1, 10**24, 10**400] if isinstance(most, int) else [most + 1, "inf", "nan"]
    for value in beyond:
        with pytest.raises(InvalidConfig, match=f"{name} must be more than 0 and at most"):
            load(tmp_path, text % (name, value))


def test_all_limits_are_bounded():
    """Every limit that can be set has a maximum."""
    assert set(config.LIMITS_MAX) == {each.name for struct in (InputLimits, Limits) for each in fields(struct)}


def test_a_file_has_a_largest_size(tmp_path):
    """A file of the maximum size is read, and one byte more is refused."""
    assert load(tmp_path, "#" * checks.FILE_BYTES_MAX).models == {}
    with pytest.raises(InvalidConfig, match="longer than"):
        load(tmp_path, "#" * (checks.FILE_BYTES_MAX + 1))


def test_serving_is_read(tmp_path):
    """What a server listens on, its projects and its webhooks arrive as they are written."""
    found = load(
        tmp_path,
        MODEL + '[server]\nport = 9000\nrows_max = 50000\n[projects.a]\nweight = 2\nmodels = ["m"]\n'
        '[[webhooks]]\nurl = "https://example.com/x"\nsecret = "env:HOOK"\n',
    )
    assert (found.server.host, found.server.port, found.server.rows_max) == ("127.0.0.1", 9000, 50_000)
    assert found.projects["a"] == config.ProjectEntry(weight=2.0, models=["m"])
    assert found.webhooks == [config.WebhookEntry("https://example.com/x", "env:HOOK")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nhosts = 1", "no key server.hosts; did you mean server.host?"),
        ("[projects.a]\nwait = 1", "no key projects.a.wait; did you mean projects.a.weight?"),
        ("[[webhooks]]\nlink = 1", "no key webhooks.link"),
        ("[projects.'a b']", "a project's name"),
        ("[projects.a]\nweight = 0", "projects.a.weight must be more than 0"),
        ("[projects.a]\nweight = nan", "projects.a.weight must be more than 0"),
        ("[projects.a]\nmodels = ['x']", "there is no model 'x'"),
        ("[[webhooks]]\nurl = 'ftp://x'\nsecret = 'env:A'", "must begin with https://"),
        ("[[webhooks]]\nurl = 'https://x'\nsecret = 'whsec_abc'", "never the secret itself"),
    ],
)
def test_what_is_wrong_with_serving_is_named(tmp_path, text, expected):
    """A key nobody knows, a share of nothing, a model that is not there: refused by name; a secret is not repeated."""
    with pytest.raises(InvalidConfig, match=expected) as refused:
        load(tmp_path, text)
    assert "abc" not in refused.value.message


@pytest.mark.parametrize("name", config.SERVER_MAX)
def test_every_limit_of_a_server_has_a_largest_value(tmp_path, name):
    """A limit of the server at its maximum is taken, and beyond it or at nothing it is refused by name."""
    most = config.SERVER_MAX[name]
    assert getattr(load(tmp_path, f"[server]\n{name} = {most}").server, name) == most
    for value in (0, -1, most + 1):
        with pytest.raises(InvalidConfig, match=f"server.{name} must be more than 0 and at most"):
            load(tmp_path, f"[server]\n{name} = {value}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_batch_inference_task = 1", "no key ml_commons.max_batch_inference_task; did you mean"),
        ("max_batch_inference_tasks = -1", "max_batch_inference_tasks must be 0 to 10,000, not -1"),
        ("max_batch_inference_tasks = 10001", "max_batch_inference_tasks must be 0 to 10,000, not 10001"),
        ("poll_s = 0", "ml_commons.poll_s must be more than 0"),
        ("poll_s = 86401", "ml_commons.poll_s must be more than 0 and at most 86,400"),
        ("poll_s = nan", "ml_commons.poll_s must be more than 0"),
        ("trusted_connector_endpoints = ['^https://[']", "ml_commons.trusted_connector_endpoints: .* cannot be read"),
        ("status_regex = { complete = 'x' }", "no key ml_commons.status_regex.complete; did you mean"),
        ("status_regex = { failed = '(' }", "ml_commons.status_regex.failed: '\\(' cannot be read"),
    ],
)
def test_what_is_wrong_with_ml_commons_is_named(tmp_path, text, expected):
    """A key nobody knows, a number out of range, an expression that is none: refused by name."""
    with pytest.raises(InvalidConfig, match=expected):
        load(tmp_path, f"[ml_commons]\n{text}")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e300"])
def test_an_age_that_is_none_is_refused(tmp_path, value):
    """How old a result may be that is taken over: more than nothing, and a number."""
    with pytest.raises(InvalidConfig, match="projects.north.reuse_age_s must be more than 0 and at most"):
        load(tmp_path, f"[projects.north]\nreuse_age_s = {value}")


@pytest.mark.parametrize("value", ["0", "100001"])
def test_a_number_of_jobs_that_is_none_is_refused(tmp_path, value):
    """How many earlier jobs a lookup looks at."""
    with pytest.raises(InvalidConfig, match="projects.north.reuse_jobs_max must be at least 1 and at most 100,000"):
        load(tmp_path, f"[projects.north]\nreuse_jobs_max = {value}")


def test_ml_commons_is_read(tmp_path):
    """Its settings arrive as they are written, and those that are not, as the page says."""
    text = "max_batch_inference_tasks = 0\npoll_s = 5\nstatus_regex = { failed = 'failed|lost' }"
    found = load(tmp_path, f"[ml_commons]\n{text}").ml_commons
    assert (found.max_batch_inference_tasks, found.poll_s, found.strict_polling) == (0, 5.0, False)
    assert (found.status_regex.failed, found.status_regex.expired) == ("failed|lost", "expired|timeout")


def test_every_key_is_documented():
    """Each key stands in the page for people and in the module's own table."""
    page = DOCS.read_text()
    keys = {"data_dir", "BATCHMILL_DATA_DIR", "BATCHMILL_CONFIG"}
    keys |= {f"limits.{each.name}" for each in fields(InputLimits)}
    keys |= {f"models.NAME.{each.name}" for each in fields(ModelEntry)}
    assert entries.__doc__ is not None
    assert [key for key in sorted(keys) if key not in entries.__doc__] == []
    for entry, place in (
        (config.ServerEntry, "server"),
        (config.ProjectEntry, "projects.NAME"),
        (FunctionsEntry, "functions"),
        (config.WebhookEntry, "webhooks"),
        (config.MlCommonsEntry, "ml_commons"),
        (config.DeploymentsEntry, "deployments"),
        (entries.MachineEntry, "machine"),
        (entries.Quotas, "quotas"),
    ):
        keys |= {f"{place}.{each.name}" for each in fields(entry)}
    keys |= {f"price.{each.name}" for each in fields(Price)} | {f"limits.{each.name}" for each in fields(Limits)}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_the_pages_example_is_valid(tmp_path):
    """The file that the page shows is read as it stands there."""
    text = DOCS.read_text().partition("```toml\n")[2].partition("```")[0]
    assert set(load(tmp_path, text).models) == {"tiny", "classify", "mini"}
