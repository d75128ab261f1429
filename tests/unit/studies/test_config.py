"""Study files: strict, complete, and the same after being written and read again."""

import tomllib
import unicodedata
from dataclasses import replace

import pytest

from coterie.engine.optim import LocalTraining
from coterie.errors import ConfigError
from coterie.methods import METHODS
from coterie.runtime.settings import Settings
from coterie.studies import config
from coterie.studies.definition import StudyConfig, make_study

STUDY = """
name = "small"
rounds = 4
seeds = [0, 1]

[data]
dataset = "digits"
num_clients = 4

[local]
lr = 0.01

[stopping]
patience = 7

[[methods]]
kind = "random"
label = "Gossip"
num_peers = 3

[[methods]]
kind = "local"
lr = 0.005
epochs = 2
"""


def read(*changes: str) -> StudyConfig:
    return config.parse_study_text(STUDY, overrides=changes)


def error_of(text: str, *changes: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config.parse_study_text(text, overrides=changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_study_file_becomes_settings_methods_and_seeds():
    study = read()
    assert (study.name, study.seeds, study.settings.rounds, study.settings.patience) == (
        "small",
        (0, 1),
        4,
        7,
    )
    assert [(entry.label, entry.kind) for entry in study.methods] == [
        ("Gossip", "random"),
        ("local", "local"),
    ]
    assert study.methods[0].method == METHODS["random"](num_peers=3)


def test_a_number_of_seeds_is_that_many_from_0_on():
    assert read("seeds=3").seeds == (0, 1, 2)
    assert read("seeds=[3]").seeds == (3,)


def test_a_method_may_override_local_training_and_leaves_the_others_alone():
    gossip, local = read().methods
    assert gossip.settings.local == LocalTraining(lr=0.01)
    assert local.settings.local == LocalTraining(lr=0.005, epochs=2)


def test_a_method_may_override_a_setting_of_the_study():
    gossip, local = read("methods.Gossip.evaluate=final", "methods.Gossip.patience=none").methods
    assert (gossip.settings.evaluate, gossip.settings.patience) == ("final", None)
    assert (local.settings.evaluate, local.settings.patience) == ("best_val", 7)


@pytest.mark.parametrize(
    "changes", [(), ("methods.Gossip.patience=none",), ("scale=0.5",), ("seeds=5",)]
)
def test_what_is_written_reads_back_as_the_same_study(changes):
    study = read(*changes)
    assert config.parse_study_text(config.format_study(study)) == study


def test_what_is_written_is_complete():
    """The resolved file states every setting that is set, so it does not depend on later defaults."""
    content = tomllib.loads(config.format_study(read()))
    for name in ("rounds", "init", "schedule", "evaluate", "participation", "dtype"):
        assert name in content
    assert content["local"].keys() >= {"epochs", "batch_size", "optimizer", "lr"}
    assert content["methods"][0] == {"kind": "random", "label": "Gossip", "num_peers": 3}
    assert content["methods"][1] == {"kind": "local", "label": "local", "lr": 0.005, "epochs": 2}


@pytest.mark.full
@pytest.mark.parametrize("name", list(config.find_builtin_studies()))
def test_every_built_in_study_reads_back_as_itself(name):
    study = config.load_study(name)
    assert study.name == name
    assert study.description
    assert config.parse_study_text(config.format_study(study)) == study


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("ronds=3", "unknown setting 'ronds'; did you mean 'rounds'?"),
        ("local.lrr=0.1", "did you mean 'lr'?"),
        ("data.num_client=3", "did you mean 'num_clients'?"),
        ("methods.Gossip.num_peer=3", "did you mean 'num_peers'?"),
        ("methods.Gosip.num_peers=3", "did you mean 'Gossip'?"),
        ("rounds='30'", "rounds is '30'; expected a whole number"),
        ("rounds=true", "rounds is True; expected a whole number"),
        ("rounds=2.5", "rounds is 2.5; expected a whole number"),
        ("rounds=many", "rounds is 'many'; expected a whole number"),
        ("local.drop_last='false'", "drop_last is 'false'; expected true or false"),
        ("local.drop_last=0", "drop_last is 0; expected true or false"),
        ("local.lr='0.1'", "lr is '0.1'; expected a number"),
        ("rounds=-1", "rounds is -1; expected a whole number, 0 or more"),
        ("evaluate=best", "evaluate is 'best'; expected 'best_val' or 'final'"),
        (
            "seeds=[]",
            "seeds is []; expected a list of whole numbers, each 0 or more, 1 or more of them",
        ),
        ("seeds=[1, 1]", "expected each seed once"),
        ("seeds=[-1]", "seeds is [-1]; expected a list of whole numbers, each 0 or more"),
        ("name='../up'", "name is '../up'"),
        ("methods.Gossip.label='a/b'", "label is 'a/b'"),
        ("methods.local.label=gossip", "two methods are called 'gossip'"),
        ("methods.local.kind=loacl", "unknown method 'loacl'; did you mean 'local'?"),
        ("methods=[]", "methods is []; expected at least one"),
        ("methods=3", "methods is 3; expected [[methods]] tables"),
        ("data=3", "data is 3; expected a table: [data]"),
        ("scale=0", "scale is 0; expected a number, above 0"),
        ("methods.Gossip=3", "expected methods.Gossip.SETTING=value"),
        ("rounds", "expected path=value"),
        ("=3", "expected path=value"),
        ("a b=3", "quote names with spaces"),
        ("sweep={rounds=3}", "sweep.rounds is 3; expected a list of values"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_was_found_and_what_was_expected(change, said):
    assert said in error_of(STUDY, change)


def test_a_missing_dataset_and_broken_toml_are_named():
    assert "dataset is missing" in error_of(STUDY.replace('dataset = "digits"', ""))
    assert "not valid TOML" in error_of("rounds = = 3")


def test_an_unknown_study_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'rotated-digits'"):
        config.load_study("rotated-digit")
    with pytest.raises(ConfigError, match=r"no study file .*nowhere\.toml"):
        config.load_study(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        config.load_study(tmp_path)


def test_a_file_without_a_name_is_called_like_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(STUDY.replace('name = "small"', ""))
    assert config.load_study(path).name == "mine"


def test_set_reaches_a_method_by_label_or_else_all_of_a_kind():
    by_label = read("methods.gossip.num_peers=1").methods[0]
    by_kind = read("methods.random.num_peers=2").methods[0]
    assert (by_label.method, by_kind.method) == (
        METHODS["random"](num_peers=1),
        METHODS["random"](num_peers=2),
    )


def test_a_kind_written_as_it_is_reaches_all_of_it_though_a_label_differs_by_case_only():
    """`methods.dac` is not the one that is labeled DAC alone."""
    text = (
        STUDY
        + '\n[[methods]]\nkind = "dac"\nlabel = "DAC"\n[[methods]]\nkind = "dac"\nlabel = "warm"\n'
    )
    for name, reached in (("dac", [7, 7]), ("DAC", [7, 30]), ("Dac", [7, 30]), ("warm", [30, 7])):
        study = config.parse_study_text(text, overrides=[f"methods.{name}.tau=7"])
        assert [entry.method.tau for entry in study.methods if entry.kind == "dac"] == reached, name


def test_set_takes_tables_lists_and_quoted_names():
    study = read(
        'data.shift=[{kind="rotation", degrees=[0, 180]}]',
        'methods."Gossip".label="A b"',
        "seeds=[3, 4]",
        "local.lr=1",
    )
    assert [*study.data.shift[0]["degrees"]] == [0, 180]
    assert (study.methods[0].label, study.seeds, study.settings.local.lr) == ("A b", (3, 4), 1.0)


def test_what_is_said_of_a_model_or_of_data_is_added_to_their_name():
    text = 'name = "x"\nmodel = "mlp"\ndata = "digits"\n[[methods]]\nkind = "local"\n'
    study = config.parse_study_text(text, overrides=["model.output=1", "data.num_clients=4"])
    assert (study.model.kind, study.model.output) == ("mlp", "1")
    assert (study.data.dataset, study.data.num_clients) == ("digits", 4)
    other = config.parse_study_text(text, overrides=["model.output=1", "model=linear"])
    assert (other.model.kind, other.model.output) == ("linear", None)


def test_an_unset_setting_of_a_method_with_another_default_is_stored_as_unset():
    text = 'name = "x"\ndata = "digits"\n[[methods]]\nkind = "fedrep"\nhead_epochs = "none"\n'
    study = config.parse_study_text(text)
    again = config.parse_study_text(config.format_study(study))
    assert study.methods[0].method.head_epochs is None
    assert again == study
    ten = config.parse_study_text(text, overrides=["methods.fedrep.head_epochs=10"])
    assert config.hash_study(ten) != config.hash_study(study)


def test_the_hash_is_that_of_what_decides_the_results():
    """Names and what only changes the speed are left out; everything else is in."""
    base = config.hash_study(read())
    assert (
        config.hash_study(
            read("name=other", "engine=loop", "description=x", "checkpoint_seconds=1")
        )
        == base
    )
    for change in (
        "rounds=5",
        "local.lr=0.02",
        "data.train=20",
        "methods.Gossip.num_peers=1",
        "seeds=[0]",
        "scale=0.5",
    ):
        assert config.hash_study(read(change)) != base, change


def test_a_difference_names_the_first_setting():
    assert config.describe_difference(read(), read("name=other")) == ""
    assert config.describe_difference(read(), read("methods.Gossip.num_peers=1")) == (
        "methods.Gossip.num_peers is 3 there and 1 here"
    )


def test_scale_shrinks_rounds_and_patience_and_never_to_nothing():
    study = read("scale=0.5", "rounds=9")
    entry = study.scale_method("Gossip")
    assert (entry.settings.rounds, entry.settings.patience, study.settings.rounds) == (4, 4, 9)
    assert read("scale=0.01").scale_method("Gossip").settings.rounds == 1


def test_where_a_method_has_a_field_of_the_same_name_its_own_is_meant():
    """FedAvgM has a momentum of the server; that of local training is reached through `local`."""
    local = '{ optimizer = "sgd", momentum = 0.25, lr = 0.125 }'
    text = STUDY + f'[[methods]]\nkind = "fedavgm"\nmomentum = 0.5\nlocal = {local}\n'
    study = config.parse_study_text(text)
    entry = study.find_method("fedavgm")
    assert entry.method == METHODS["fedavgm"](momentum=0.5)
    assert (entry.settings.local.momentum, entry.settings.local.lr) == (0.25, 0.125)
    assert config.parse_study_text(config.format_study(study)) == study


def test_a_grid_is_read_with_dotted_or_nested_paths():
    dotted = config.parse_study_text(STUDY + '\n[sweep]\n"methods.Gossip.num_peers" = [1, 2]\n')
    nested = config.parse_study_text(STUDY + "\n[sweep]\nmethods.Gossip.num_peers = [1, 2]\n")
    assert dotted.sweep == nested.sweep
    assert list(dotted.sweep) == ["methods.Gossip.num_peers"]


@pytest.fixture
def extended(tmp_path):
    """Return a function that reads a file which extends STUDY and says the given text."""
    (tmp_path / "base.toml").write_text(STUDY)

    def read(text, *changes, source="base.toml"):
        path = tmp_path / "mine.toml"
        path.write_text(f'extends = "{source}"\n{text}')
        return config.load_study(path, changes)

    return read


def labels(study):
    return [entry.label for entry in study.methods]


def test_a_file_that_extends_another_says_only_what_differs(extended):
    study = extended('rounds = 9\nlocal.batch_size = 16\ndata.dataset = ["digits", "digits"]')
    settings = study.settings
    assert (study.name, settings.rounds, settings.local.batch_size, settings.local.lr) == (
        "mine",
        9,
        16,
        0.01,
    )
    assert study.data.dataset == ("digits", "digits")
    assert (study.seeds, settings.patience, study.data.num_clients) == ((0, 1), 7, 4)
    assert [entry.method for entry in study.methods] == [entry.method for entry in read().methods]


def test_set_wins_over_a_file_that_extends_and_what_is_stored_extends_nothing(extended):
    study = extended("rounds = 9", "rounds=2", "methods.gossip.num_peers=1")
    assert (study.settings.rounds, study.methods[0].method) == (2, METHODS["random"](num_peers=1))
    assert "extends" not in config.make_study_table(study)
    assert config.parse_study_text(config.format_study(study)) == study


@pytest.mark.parametrize(
    "text",
    [
        "[[methods]]\nlabel = 'gossip'\nnum_peers = 1",
        "methods.Gossip.num_peers = 1",
        "[methods.random]\nnum_peers = 1",
    ],
)
def test_a_method_that_is_there_is_changed(extended, text):
    assert extended(text) == replace(read("methods.Gossip.num_peers=1"), name="mine")


def test_a_method_that_is_not_there_is_added_and_use_methods_chooses_and_orders(extended):
    new = '[[methods]]\nkind = "dac"\nlabel = "New"'
    assert labels(extended(new)) == ["Gossip", "local", "New"]
    assert labels(extended('use_methods = ["New", "random"]\n' + new)) == ["New", "Gossip"]


def test_an_assignment_too_chooses_methods_and_the_file_need_not_extend_another():
    assert labels(read('use_methods=["local"]')) == ["local"]
    assert labels(config.parse_study_text('use_methods = ["local", "random"]\n' + STUDY)) == [
        "local",
        "Gossip",
    ]
    with pytest.raises(
        ConfigError, match="unknown method of this study 'Gosip'; did you mean 'Gossip'"
    ):
        read('use_methods=["Gosip"]')


def test_what_is_unset_has_its_default_again(extended):
    study = extended('unset = ["rounds", "stopping", "methods.local.lr", "methods.random"]')
    assert (study.settings.rounds, study.settings.patience) == (Settings().rounds, None)
    assert labels(study) == ["local"]
    assert (study.methods[0].settings.local.lr, study.methods[0].settings.local.epochs) == (0.01, 2)
    assert extended('unset = ["data"]\ndata.dataset = "digits"').data.num_clients is None


def test_a_chain_is_followed_and_paths_are_relative_to_the_file_that_says_them(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "base.toml").write_text(STUDY)
    (tmp_path / "far/middle.toml").write_text(
        'extends = "../base.toml"\nrounds = 5\nlocal.epochs = 3'
    )
    (tmp_path / "mine.toml").write_text('extends = "far/middle.toml"\nrounds = 6')
    settings = config.load_study(tmp_path / "mine.toml").settings
    assert (settings.rounds, settings.local.epochs, settings.local.lr) == (6, 3, 0.01)
    assert config.parse_study_text('extends = "rotated-digits"').data == config.load_study().data


def test_a_circle_is_refused(tmp_path):
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "a.toml"')
    with pytest.raises(
        ConfigError, match=r"extends itself: a\.toml extends b\.toml extends a\.toml$"
    ):
        config.load_study(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "methods.Gosip.num_peers = 1",
            "unknown method of this study 'Gosip'; did you mean 'Gossip'?",
        ),
        ("[[methods]]\nlabel = 'Gosip'", "unknown method 'Gosip'; did you mean 'Gossip'?"),
        ("methods = 3", "methods is 3; expected [[methods]] tables, each with a kind"),
        ("use_methods = ['Gosip']", "did you mean 'Gossip'?"),
        ("use_methods = 'Gossip'", "use_methods is 'Gossip'; expected a list of names"),
        (
            "unset = ['stoping.patience']",
            "unset stoping.patience: unknown key 'stoping'; did you mean 'stopping'?",
        ),
        (
            "unset = ['methods.Gossip.num_peer']",
            "unknown key 'num_peer'; did you mean 'num_peers'?",
        ),
        ("unset = ['rounds.more']", "unset rounds.more: rounds is 4; expected a table"),
        ("rnds = 3", "unknown setting 'rnds'"),
    ],
)
def test_a_mistake_in_a_file_that_extends_is_one_line(extended, text, said):
    with pytest.raises(ConfigError) as caught:
        extended(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_parent_that_is_not_there_is_named_with_the_file_that_wants_it(extended):
    for source, said in [
        ("dac/_bas", "did you mean 'dac/_base'"),
        ("no.toml", r"no study file .*no\.toml"),
    ]:
        with pytest.raises(ConfigError, match=rf"mine\.toml: .*{said}"):
            extended("", source=source)
    with pytest.raises(ConfigError, match="extends is 3; expected the name of a study"):
        config.parse_study_text("extends = 3")


def test_a_base_is_no_study_of_its_own():
    assert "dac/_base" in config.find_builtin_studies(bases=True)
    assert "dac/_base" not in config.find_builtin_studies()
    with pytest.raises(ConfigError, match="unknown study 'dac/_base'"):
        config.load_study("dac/_base")


def test_a_path_of_own_data_leads_from_here_or_from_the_study_file(tmp_path, monkeypatch):
    """What is here comes first; what lies beside the file gets its whole path, so that a resumed run finds it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "far").mkdir()
    data = (
        '[data]\ndataset = "table"\noptions = { path = "t.csv", target = "y", test = "held.csv" }\n'
    )
    (tmp_path / "far/base.toml").write_text(data + '[[methods]]\nkind = "local"\n')
    (tmp_path / "mine.toml").write_text('extends = "far/base.toml"\n')
    (tmp_path / "far/t.csv").write_text("y\n")
    for file in ("far/base.toml", "mine.toml"):
        options = config.load_study(file).data.options
        assert options == {"path": str(tmp_path / "far/t.csv"), "target": "y", "test": "held.csv"}
    (tmp_path / "t.csv").write_text("y\n")
    assert config.load_study("mine.toml").data.options["path"] == "t.csv"


@pytest.mark.parametrize("label", ["Größe", "東京 2", "हिन्दी", "τ=0.5, m", "عربي", "a" * 200])
def test_a_label_may_be_of_any_script_and_is_set_with_and_without_quotes(label):
    study = config.parse_study_text(
        STUDY.replace('label = "Gossip"', f'label = "{label}"'),
        overrides=[f'methods."{label}".num_peers=1'],
    )
    assert study.find_method(label).method.num_peers == 1
    assert config.parse_study_text(config.format_study(study)) == study
    if "=" not in label and "." not in label:
        study = config.parse_study_text(
            config.format_study(study), overrides=[f"methods.{label}.num_peers=2"]
        )
        assert study.find_method(label).method.num_peers == 2


@pytest.mark.parametrize(
    "label",
    [
        "..",
        ".a",
        "a.",
        "a ",
        " a",
        "a/b",
        "a\\\\b",
        "a\\u0007b",
        "_a",
        "a" * 201,
        "ä" * 101,
        "Config.toml",
        "B2SUMS",
    ],
)
def test_a_label_that_is_no_good_folder_is_refused(label):
    assert "label is " in error_of(STUDY.replace('label = "Gossip"', f'label = "{label}"'))


def test_labels_that_differ_in_case_or_in_how_an_accent_was_typed_are_the_same():
    for one, other in (("GRÖSSE", "größe"), ("Größe", unicodedata.normalize("NFD", "Größe"))):
        text = STUDY.replace('label = "Gossip"', f'label = "{one}"').replace(
            'kind = "local"', f'kind = "local"\nlabel = "{other}"'
        )
        assert "two methods are called" in error_of(text)


def test_a_study_made_in_python_obeys_the_same_rules():
    with pytest.raises(ConfigError, match=r"label is '\.\./up'"):
        make_study({"../up": METHODS["local"]()})
    assert make_study([METHODS["local"]()], seeds=2).seeds == (0, 1)


@pytest.mark.parametrize(
    "change", ["seeds=99999999999999999999", "seeds=20000", "seeds=0", "seeds=-3"]
)
def test_a_number_of_seeds_that_nobody_means_is_refused(change):
    assert "expected a number of seeds, 1 to 10000, or a list of seeds" in error_of(STUDY, change)


@pytest.mark.parametrize("change", ["seeds=[99999999999999999999]", "rounds=9223372036854775808"])
def test_numbers_that_no_machine_counts_to_are_refused(change):
    assert "and below 2^63" in error_of(STUDY, change)


def test_a_text_in_a_setting_may_be_of_any_script():
    assert (
        config.parse_study_text(STUDY, overrides=["description=🏥 größer als"]).description
        == "🏥 größer als"
    )


OWN = """
data = { dataset = "digits", num_clients = 4, shift = [{ kind = "nowhere.data:Salt", amount = 0.1 }] }
model = { kind = "nowhere.nets:Net", options = { width = 3 } }

[[methods]]
kind = "random"
aggregation = "nowhere.rules:median"

[[methods]]
kind = "dac"
selection = "nowhere.rules:curious"
"""


def test_what_is_named_by_import_path_is_not_imported_to_be_read():
    """It reads back as itself, and is part of what decides the results."""
    study = config.parse_study_text(OWN, to_run=False)
    assert config.parse_study_text(config.format_study(study)) == study
    named = {
        key: value for key, value in config.make_identity(study).items() if "nowhere" in str(value)
    }
    assert named == {
        "data.shift": [{"kind": "nowhere.data:Salt", "amount": 0.1}],
        "methods.random.aggregation": "nowhere.rules:median",
        "methods.dac.selection": "nowhere.rules:curious",
        "model.kind": "nowhere.nets:Net",
    }
    assert config.make_identity(study)["model.options.width"] == 3
    with pytest.raises(ConfigError, match="there is no module 'nowhere'"):
        study.data.build_shifts()


def test_a_model_without_arguments_is_written_without_them():
    assert "options" not in config.make_study_table(read())["model"]


FORMER = """
name = "former"
metrics = ["auroc"]
extra_metrics = ["balanced_accuracy", "maxima"]
[data]
dataset = "digits"
[[methods]]
kind = "local"
[[methods]]
kind = "random"
label = "outputs"
metrics = ["brier"]
[[methods]]
kind = "random"
label = "runs"
extra_metrics = ["clusters"]
[[methods]]
kind = "random"
label = "both"
metrics = []
extra_metrics = []
"""


def test_the_former_setting_extra_metrics_is_a_part_of_metrics():
    """In files that have it, both settings of the study apply to a method one by one."""
    study = config.parse_study_text(FORMER)
    assert study.settings.metrics == ("auroc", "balanced_accuracy", "maxima")
    assert [entry.settings.metrics for entry in study.methods] == [
        ("auroc", "balanced_accuracy", "maxima"),
        ("brier", "balanced_accuracy", "maxima"),
        ("auroc", "clusters"),
        (),
    ]
    written = config.format_study(study)
    assert "extra_metrics" not in written
    assert config.parse_study_text(written) == study
    added = config.parse_study_text(FORMER, overrides=["extra_metrics=['clusters']"])
    assert added.settings.metrics == ("auroc", "clusters")
    with pytest.raises(ConfigError, match="extra_metrics is 'maxima'; expected a list of names"):
        config.parse_study_text(FORMER, overrides=["extra_metrics=maxima"])


def test_studies_with_the_former_setting_keep_their_identity():
    """Stored runs are found again by it: computed before `extra_metrics` became a part of `metrics`."""
    found = config.make_identity(config.parse_study_text(FORMER))
    assert found["metrics"] == ["auroc"]
    assert found["extra_metrics"] == ["balanced_accuracy", "maxima"]
    assert config.hash_study(config.parse_study_text(FORMER)) == "14aadf32355235cf"
