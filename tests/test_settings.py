"""Settings: the strict YAML reader, ranges, precedence, and the map of the original engine's settings."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import SettingsError
from deepinfer.runtime.threads import physical_cores
from deepinfer.settings import UNSET, CompileConfig, ServeConfig, load_settings
from deepinfer.settings_map import SOURCE_SETTINGS
from deepinfer.yaml_loader import MAX_FILE_BYTES, parse_yaml, read_yaml

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("y", "y"),
        ("true", True),
        ("false", False),
        ("True", "True"),
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("-1.5e+3", -1500.0),
        (".5", 0.5),
        ("12", 12),
        ("-3", -3),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("'5'", "5"),
        ("", None),
        ("null", None),
        (".inf", ".inf"),
        ("[4, 8]", [4, 8]),
    ],
)
def test_a_plain_scalar_means_what_it_says(text: str, value: object) -> None:
    parsed = parse_yaml(f"key: {text}", where="x.yaml")["key"]
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' appears twice"),
        ("a: {b: 1, b: 2}", "the key 'b' appears twice"),
        ("a: &x 1\nb: *x", "anchors and aliases"),
        ("a: *x", "anchors and aliases"),
        ("a: !!python/object/apply:os.system [ls]", "tags such as"),
        ("a: !!int 5", "tags such as"),
        ("a: 1\n---\nb: 2", "another document"),
        ("1: 2", "keys must be words"),
        ("true: 2", "keys must be words"),
        ("? [a]\n: 1", "keys must be words"),
        ("- 1", "must be a mapping of settings, not a list"),
        ("hello", "must be a mapping of settings, not a string"),
        ("a: " + "[" * 50, "nested deeper"),
        ("a: " + "[" * 5000, "nested deeper"),
        ("a: 1e999", "too large"),
        ("a: " + "9" * 5000, "too many digits"),
        ("a: [1", "line"),
        ("\ta: 1", "line 1"),
        ("a: \x07", "not allowed"),
    ],
)
def test_the_reader_refuses_what_can_surprise(text: str, fault: str) -> None:
    with pytest.raises(SettingsError, match="x.yaml") as raised:
        parse_yaml(text, where="x.yaml")
    assert fault in str(raised.value)


def test_a_merge_key_is_only_an_unknown_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="unknown setting"):
        load_settings(_file(tmp_path, "compile:\n  <<: {jobs: 1}"))


@given(st.text(max_size=60))
def test_any_text_parses_to_a_mapping_or_a_settings_error(text: str) -> None:
    try:
        assert isinstance(parse_yaml(text, where="x"), dict)
    except SettingsError as error:
        assert "\n" not in str(error)


def test_files_that_are_no_small_utf8_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    with pytest.raises(SettingsError, match="cannot be read"):
        read_yaml(path)
    path.write_bytes(b"a: \xff")
    with pytest.raises(SettingsError, match="not UTF-8"):
        read_yaml(path)
    path.write_bytes(b"#" * MAX_FILE_BYTES)
    assert read_yaml(path) == {}
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(SettingsError, match="larger than"):
        read_yaml(path)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = _file(
        tmp_path, "compile:\n  precision: float32\n  jobs: 3\n  taps: off\nserve:\n  num_threads: 2\n"
    )
    settings = load_settings(path, compile_flags={"jobs": 5, "precision": UNSET})
    assert settings.compile == CompileConfig(precision="float32", jobs=5, taps="off")
    assert settings.serve == ServeConfig(num_threads=2)
    assert load_settings().compile == CompileConfig()


@pytest.mark.parametrize("text", ["", "compile:\n", "# nothing\n", "compile: {}\nserve:\n"])
def test_an_empty_file_or_section_means_defaults(tmp_path: Path, text: str) -> None:
    assert load_settings(_file(tmp_path, text)).compile == CompileConfig()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("compile: {precisoin: native}", "compile.precisoin: unknown setting (did you mean 'precision'?)"),
        ("compil: {}", "compil: unknown setting (did you mean 'compile'?)"),
        ("serve: {zzz: 1}", "known here: num_threads, max_num_seqs"),
        ("compile: 5", "compile: must be a mapping"),
        ("compile: {jobs: yes}", "compile.jobs: expected int | null, got str, given 'yes'"),
        ("compile: {jobs: true}", "got bool"),
        ("compile: {jobs: 0}", "compile.jobs: expected int >= 1, given 0"),
        ("compile: {jobs: 1e1}", "got float"),
        ("compile: {decode_rows: 4}", "compile.decode_rows: expected array"),
        ("compile: {decode_rows: []}", "length >= 1"),
        ("compile: {decode_rows: [0]}", "int >= 1"),
        ("compile: {prefill_tokens: [99999]}", "int <= 16384"),
        ("compile: {precision: bf16}", "must be one of native, float32, given 'bf16'"),
        ("compile: {target: cuda}", "must be one of cpu, cuda:sm_90, cuda:sm_100, given 'cuda'"),
        ("compile: {max_model_len: 1}", "int >= 2"),
        ("compile: {disabled_passes: [../x]}", "compile.disabled_passes"),
        ("serve: {num_threads: -1}", "serve.num_threads"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fault(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load_settings(_file(tmp_path, text))
    assert fault in str(raised.value)


@pytest.mark.parametrize(
    "setting", [setting for setting in SOURCE_SETTINGS if setting.status == "planned"], ids=lambda s: s.name
)
def test_a_setting_that_is_not_available_yet_is_refused_by_name(tmp_path: Path, setting) -> None:
    section, _, key = setting.name.partition(".")
    with pytest.raises(SettingsError, match="does not have it yet"):
        load_settings(_file(tmp_path, f"{section}: {{{key}: 1}}"))


def test_a_fixed_behaviour_cannot_be_switched(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="always on"):
        load_settings(_file(tmp_path, "serve: {batch_invariant: false}"))


def test_the_map_of_settings_names_only_options_that_exist_or_do_not_as_it_says() -> None:
    fields = {f"compile.{name}" for name in CompileConfig.__struct_fields__}
    fields |= {f"serve.{name}" for name in ServeConfig.__struct_fields__}
    for setting in SOURCE_SETTINGS:
        named = setting.name.split(", ")
        assert all((name in fields) == (setting.status == "option") for name in named), setting


def test_the_manual_lists_every_setting_and_every_row_of_the_map() -> None:
    manual = (DOCS / "settings.md").read_text("utf-8")
    for name in CompileConfig.__struct_fields__ + ServeConfig.__struct_fields__:
        assert f"| `{name}` |" in manual, name
    for setting in SOURCE_SETTINGS:
        source = f"`{setting.source}`" if setting.source.isupper() else setting.source
        assert f"| {source} | {setting.status} |" in manual, setting.source


def test_row_lists_are_sorted_without_repetitions() -> None:
    assert CompileConfig(decode_rows=[8, 1, 8]).decode_rows == (1, 8)  # type: ignore[arg-type]


def test_what_is_derived_follows_the_model() -> None:
    config = CompileConfig(decode_rows=(2, 4), max_num_seqs=3).resolved(max_position_embeddings=200)
    assert (config.max_model_len, config.logits_rows, config.num_blocks) == (200, (4,), 1 + 3 * 2)
    assert config.jobs == physical_cores() >= 1 and config.blocks_per_request == 2
    assert config.resolved(max_position_embeddings=200) == config
    assert CompileConfig().resolved(max_position_embeddings=10**6).max_model_len == 1024


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (CompileConfig(max_model_len=201), "beyond the model's 200 positions"),
        (CompileConfig(max_model_len=200, num_blocks=2), "give at least 3"),
    ],
)
def test_a_config_that_the_model_cannot_serve_is_refused(config: CompileConfig, fault: str) -> None:
    with pytest.raises(SettingsError, match=fault):
        config.resolved(max_position_embeddings=200)


def test_the_effective_configuration_is_plain_and_leaves_out_what_cannot_change_the_result() -> None:
    first = CompileConfig(jobs=1).resolved(max_position_embeddings=4096).effective()
    second = CompileConfig(jobs=7).resolved(max_position_embeddings=4096).effective()
    assert first == second and "jobs" not in first
    assert set(first) == set(CompileConfig.__struct_fields__) - {"jobs", "target", "kv_cache_memory_bytes"}
    assert None not in first.values() and first["decode_rows"] == [1, 2, 4, 8]


@given(rows=st.lists(st.integers(1, 16384), min_size=1, max_size=64), seqs=st.integers(1, 4096))
def test_every_config_in_range_survives_its_plain_form(rows: list[int], seqs: int) -> None:
    config = CompileConfig(decode_rows=tuple(rows), max_num_seqs=seqs).resolved(max_position_embeddings=4096)
    assert CompileConfig(**config.effective(), jobs=config.jobs) == config  # type: ignore[arg-type]


def _file(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path
