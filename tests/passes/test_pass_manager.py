"""The manager: order, counts, dumps, identity, and refusal of passes that break a rule."""

import hashlib
from pathlib import Path

import pytest
import torch
from toy_graph import Function, capture

from deepinfer.errors import PassError, SettingsError
from deepinfer.passes import PASSES_EXACT, Pass, PassManager, graph_text
from deepinfer.passes import canonicalize as canonicalize_file

aten = torch.ops.aten
X = torch.ones(4, 8)


def program_of(function=lambda x, y: ((x + y) * 2, (x + y).exp()), *inputs):
    return capture(Function(function), *(inputs or (X, X)))


def first_call(graph_module, target):
    return next(iter(graph_module.graph.find_nodes(op="call_function", target=target)))


def run_one(function, program=None, **options):
    return PassManager([Pass("step", function, **options)]).run(
        program or program_of(), {"layers": 2}, name="g"
    )


def test_the_report_says_what_ran_in_order():
    report = PassManager(PASSES_EXACT[:3], disabled=["remove_dead_code"]).run(program_of())
    names = [record["name"] for record in report.to_records()]
    assert names == ["canonicalize", "remove_dead_code", "fuse_compress"]
    assert report.disabled == ("remove_dead_code",) and report.approximate == ()
    assert report.results[1].rewrites is None


def test_the_identity_of_a_pass_is_its_source():
    digest = hashlib.sha256(Path(canonicalize_file.__file__).read_bytes()).hexdigest()
    assert PASSES_EXACT[0].name == "canonicalize" and PASSES_EXACT[0].source_sha256 == digest


def test_the_report_of_two_runs_is_the_same_and_has_no_times():
    times = []
    first = PassManager(PASSES_EXACT[:2]).run(program_of(), progress=lambda *item: times.append(item))
    assert first == PassManager(PASSES_EXACT[:2]).run(program_of())
    assert [name for name, _, _ in times] == ["canonicalize", "remove_dead_code"]
    assert "seconds" not in str(first.to_records())


def test_dumps_show_the_graph_before_and_after(tmp_path):
    def swap(graph_module):
        node = first_call(graph_module, aten.exp.default)
        node.target = aten.log.default
        return 1

    recorded = []
    PassManager([Pass("swap", swap, exact=False), Pass("off", swap)], ["off"], tmp_path).run(
        program_of(), name="decode-4", record=lambda *text: recorded.append(text)
    )
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.txt"))
    assert files == ["decode-4/00-captured.txt", "decode-4/01-swap.txt"]
    texts = [(tmp_path / file).read_text() for file in files]
    assert "aten.exp" in texts[0] and "aten.log" in texts[1]
    assert recorded == [("captured", texts[0]), ("swap", texts[1])]


def test_approximate_passes_are_listed_if_they_fired():
    def swap(graph_module):
        first_call(graph_module, aten.exp.default).target = aten.log.default
        return 1

    assert run_one(swap, exact=False).approximate == ("step",)
    assert run_one(lambda graph_module: 0, exact=False).approximate == ()


def test_a_count_that_the_model_asks_for_is_checked():
    assert run_one(lambda graph_module: 0, expected=lambda facts: 0).results[0].expected == 0
    with pytest.raises(
        PassError, match="pass step fired 0 times where the model asks for 2; nearest miss: x is b"
    ):
        run_one(lambda g: 0, expected=lambda facts: facts["layers"], nearest_miss=lambda g: "x is bf16")


def test_a_disabled_pass_is_not_counted():
    step = Pass("step", lambda graph_module: 0, expected=lambda facts: 2)
    assert PassManager([step], disabled=["step"]).run(program_of()).results[0].expected == 2


def test_unknown_names_cannot_be_disabled():
    with pytest.raises(SettingsError, match="there is no pass fuse_all .*canonicalize, remove_dead_code"):
        PassManager(PASSES_EXACT, disabled=["fuse_all"])


def silent_change(graph_module):
    first_call(graph_module, aten.exp.default).target = aten.log.default
    return 0


def unordered(graph_module):
    graph = graph_module.graph
    graph.find_nodes(op="output")[0].prepend(first_call(graph_module, aten.add.Tensor))
    return 1


def without_metadata(graph_module):
    exp = first_call(graph_module, aten.exp.default)
    with graph_module.graph.inserting_before(exp):
        new = graph_module.graph.call_function(aten.exp.default, exp.args)
    exp.replace_all_uses_with(new)
    return 1


def wrong_metadata(graph_module):
    exp = first_call(graph_module, aten.exp.default)
    exp.meta["val"] = exp.meta["val"].new_empty(8, 4)
    return 1


def drops_an_output(graph_module):
    output = graph_module.graph.find_nodes(op="output")[0]
    output.args = (output.args[0][:1],)
    return 1


def changes_a_dtype(graph_module):
    exp = first_call(graph_module, aten.exp.default)
    with graph_module.graph.inserting_after(exp):
        cast = graph_module.graph.call_function(aten.to.dtype, (exp, torch.bfloat16))
    cast.meta["val"] = exp.meta["val"].to(torch.bfloat16)
    exp.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return 1


def returns_an_input(graph_module):
    output = graph_module.graph.find_nodes(op="output")[0]
    output.args = ((output.args[0][0], graph_module.graph.find_nodes(op="placeholder")[0]),)
    return 1


def writes_an_input(graph_module):
    exp = first_call(graph_module, aten.exp.default)
    with graph_module.graph.inserting_before(exp):
        written = graph_module.graph.call_function(
            aten.exp_.default, (exp.all_input_nodes[0].all_input_nodes[0],)
        )
    written.meta["val"] = exp.meta["val"]
    return 1


def removes_an_input(graph_module):
    x, y = graph_module.graph.find_nodes(op="placeholder")
    y.replace_all_uses_with(x)
    graph_module.graph.erase_node(y)
    return 1


@pytest.mark.parametrize(
    ("bad_pass", "message"),
    [
        (silent_change, "changed the graph and reports no rewrite"),
        (unordered, "malformed"),
        (without_metadata, "exp.* has no metadata"),
        (
            wrong_metadata,
            "claims float32\\[8, 4\\] but computes float32\\[4, 8\\]|outputs of the graph changed",
        ),
        (drops_an_output, "outputs of the graph changed"),
        (changes_a_dtype, "outputs of the graph changed.*bfloat16"),
        (returns_an_input, "shares the memory of input"),
        (writes_an_input, "mutated of the graph changed"),
        (removes_an_input, "inputs of the graph changed"),
    ],
)
def test_a_pass_that_breaks_a_rule_is_stopped(bad_pass, message):
    with pytest.raises(PassError, match=f"g, pass step: .*({message})"):
        run_one(bad_pass)


def test_an_output_that_aliases_an_input_is_refused_before_passes():
    with pytest.raises(PassError, match="before passes: output .* shares the memory of input"):
        PassManager([]).run(program_of(lambda x: (x.view(8, 4),), X))


def test_inner_metadata_is_recomputed():
    def lie(graph_module):
        add = first_call(graph_module, aten.add.Tensor)
        add.meta["val"] = add.meta["val"].double()
        return 1

    with pytest.raises(PassError, match="claims float64\\[4, 8\\] but computes float32\\[4, 8\\]"):
        run_one(lie)


def test_the_program_still_runs_after_passes():
    program = program_of()
    expected = program.module()(X, X)
    PassManager(PASSES_EXACT, ["check_invariance"]).run(program)
    assert all(torch.equal(a, b) for a, b in zip(program.module()(X, X), expected, strict=True))


def test_graph_text_is_stable_and_names_no_place():
    text = graph_text(program_of().graph_module)
    assert text == graph_text(program_of().graph_module)
    assert text.splitlines()[0] == "%0 = input inputs_0 : float32[4, 8]"
    assert "return [%" in text and "/" not in text and "0x" not in text


def test_graph_text_shows_strides_floats_and_written_inputs():
    def step(x, index, region):
        region.index_put_((index,), x.t() * 0.1)
        return (x.sum(),)

    arena = torch.zeros(9, 16)
    text = graph_text(program_of(step, torch.ones(4, 4), torch.arange(4), arena[:, :4]).graph_module)
    assert "input inputs_2! : float32[9, 4] strides [16, 1]" in text
    assert "0.1)" in text and "float32[4, 4] strides [1, 4]" in text
