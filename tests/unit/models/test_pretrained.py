"""Models of transformers by name and adapters of peft on them, against both libraries alone."""

import copy
import json
import socket
import sys

import pytest
import torch
from tests.hugging import attach_lora
from torch import nn

import coterie
from coterie.errors import ConfigError, ModelError
from coterie.models import pretrained
from coterie.models.layout import NamedModel, build_model, custom_model_name, resolve_model
from coterie.runtime.models import load_models
from coterie.studies.config import format_study, hash_study, load_study, parse_study_text

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
TOKENS = 30


def seed(number=0):
    torch.manual_seed(number)  # noqa: TID251


def make_llama():
    config = transformers.LlamaConfig(
        vocab_size=TOKENS, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The folder of a small language model."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    seed()
    make_llama().save_pretrained(folder)
    return folder


def test_a_folder_is_loaded_with_its_weights_and_its_task(stored, capfd):
    module = build_model(f"hf:{stored}", (8,), 8)
    expected = transformers.AutoModelForCausalLM.from_pretrained(stored)
    capfd.readouterr()
    assert type(module) is type(expected)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor)
    build_model(f"hf:{stored}", (8,), 8)
    assert capfd.readouterr() == ("", "")


def test_a_model_for_classes_gets_as_many_outputs_as_there_are_classes(stored):
    """The head is new: it is drawn from the stream under which the model is made."""
    made = []
    for number in (1, 1, 2):
        seed(number)
        made.append(build_model(f"hf:{stored}", (8,), 5, {"task": "seq-cls"}))
    assert all(type(one).__name__ == "LlamaForSequenceClassification" for one in made)
    heads = [one.score.weight for one in made]
    assert heads[0].shape == (5, 16)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("./nowhere", {}, r"model hf:./nowhere: there is no folder ./nowhere; expected one that save_pretrained"),
        ("{stored}", {"task": "talking"}, "model.options: unknown task 'talking'"),
        ("{stored}", {"task": "causal-lm", "talking": 1}, "cannot be loaded: .*talking"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_one_line(stored, name, options, said):
    with pytest.raises((ConfigError, ModelError), match=said) as raised:
        build_model(f"hf:{name.format(stored=stored)}", (8,), 8, options)
    assert "\n" not in str(raised.value)


def test_a_model_that_does_not_say_what_it_is_for_needs_a_task(stored, tmp_path):
    config = json.loads((stored / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"does not say what it is for \(llama\); set model.op"):
        build_model(f"hf:{tmp_path}", (8,), 8)


def test_a_name_is_not_looked_for_where_the_hub_cannot_be_reached(monkeypatch):
    asked = []

    def refuse(address, timeout):
        asked.append(address)
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for key in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "HF_ENDPOINT"):
        monkeypatch.delenv(key, raising=False)
    with pytest.raises(
        ModelError, match=r"hf:no-one/none: there is no folder .* cannot be reached"
    ):
        build_model("hf:no-one/none", (8,), 8)
    assert asked == [("huggingface.co", 443)]


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_a_missing_package_is_named_with_what_to_install(stored, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    model = NamedModel(f"hf:{stored}", adapter={"kind": "lora"})
    with pytest.raises(
        ConfigError, match=rf"needs the package {package}.*: pip install .*(adapters|peft)"
    ):
        resolve_model(model, (8,), 8)


# ---------------------------------------------------------------- adapters


def test_an_adapter_is_what_peft_makes(stored):
    base = transformers.AutoModelForCausalLM.from_pretrained(stored)
    given = {"r": 3, "alpha": 6, "target": ["q_proj", "v_proj"], "dropout": 0.1}
    seed()
    made = pretrained.attach_adapter(copy.deepcopy(base), given)
    seed()
    expected = attach_lora(
        base, 3, lora_alpha=6, target_modules=["q_proj", "v_proj"], lora_dropout=0.1,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    assert type(made) is type(expected)
    assert made.peft_config["default"].to_dict() == expected.peft_config["default"].to_dict()
    trained = [name for name, one in made.named_parameters() if one.requires_grad]
    assert trained == [name for name, one in expected.named_parameters() if one.requires_grad]
    for name, tensor in expected.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor)


def test_ffa_trains_b_alone_and_draws_a_once_for_all_seeds(stored):
    model = NamedModel(f"hf:{stored}", adapter={"kind": "ffa-lora", "r": 2, "target": ["q_proj"]})
    make = resolve_model(model, (8,), 8)
    trained = [name for name, one in make().named_parameters() if one.requires_grad]
    assert trained
    assert all(".lora_B." in name for name in trained)
    runs = [simulate(texts(), model, seed=number) for number in (0, 1)]
    homes = [run.model(0).state_dict() for run in runs]
    for name, tensor in homes[0].items():
        assert torch.equal(tensor, homes[1][name]) == (".lora_B." not in name), name
    columns = [name for name in homes[0] if ".lora_B." in name]
    assert len(columns) == 2


def test_an_adapter_goes_on_any_module():
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    made = pretrained.attach_adapter(module, {"r": 2, "target": ["0"], "trained": ["2"]})
    trained = {name: one.shape for name, one in made.named_parameters() if one.requires_grad}
    assert set(trained.values()) == {(2, 4), (6, 2), (3, 6), (3,)}


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"target": ["nowhere"]}, "model.adapter cannot be attached: .*nowhere.* not found"),
        ({"rank": 3}, "model.adapter: unknown setting 'rank'|model.adapter: unknown"),
        ({"kind": "prefix"}, "model.adapter"),
        ({"r": 0}, "model.adapter"),
        ({"options": {"talking": 1}}, "model.adapter cannot be attached: .*talking"),
    ],
)
def test_what_is_no_adapter_is_one_line(adapter, said):
    module = nn.Sequential(nn.Linear(4, 6))
    with pytest.raises((ConfigError, ModelError), match=said) as raised:
        pretrained.attach_adapter(module, adapter)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------- runs and study files


def texts(clients=3, samples=12):
    stream = torch.Generator().manual_seed(1)
    ids = torch.randint(1, TOKENS, (clients * samples, 6), generator=stream)
    return coterie.from_arrays(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        ids,
        clients=[place % clients for place in range(len(ids))],
    )


def simulate(data, model, seed=0, folder=None):
    local = coterie.LocalTraining(steps=1, batch_size=4, lr=0.01)
    settings = coterie.Settings(rounds=1, local=local, loss="causal-lm", engine="loop", check=False)
    return coterie.simulate(
        data, coterie.Random(num_peers=1), model=model, settings=settings, seed=seed, folder=folder
    )


def test_a_run_is_taken_home_from_its_folder_alone(stored, tmp_path):
    model = NamedModel(f"hf:{stored}", adapter={"r": 2, "target": ["q_proj"]})
    run = simulate(texts(), model, folder=tmp_path)
    home, x = load_models(tmp_path), torch.randint(1, TOKENS, (2, 6))
    given = {"input_ids": x, "attention_mask": torch.ones_like(x)}
    assert torch.equal(home.predict(1, given), run.predict(1, given))
    module = home.model(1)
    assert isinstance(module, peft.PeftModel)
    generated = module.generate(**given, max_new_tokens=2, do_sample=False)
    assert generated.shape == (2, 8)
    assert torch.equal(generated[:, :6], x)


STUDY = """
rounds = 1
seeds = [0]
loss = "causal-lm"
[data]
dataset = "digits"
num_clients = 3
[model]
kind = "hf:llama"
[model.adapter]
kind = "lora"
r = 8
target = ["q_proj", "v_proj"]
[[methods]]
kind = "random"
"""


def test_a_study_file_names_a_model_and_its_adapter(tmp_path):
    study = parse_study_text(STUDY)
    adapter = study.model.named_model.adapter
    assert (adapter["kind"], adapter["r"], adapter["target"]) == ("lora", 8, ["q_proj", "v_proj"])
    assert parse_study_text(format_study(study)) == study
    other = parse_study_text(STUDY.replace("r = 8", "r = 4"))
    assert hash_study(other) != hash_study(study)
    assert custom_model_name(other.model.named_model) != custom_model_name(study.model.named_model)
    with pytest.raises(ConfigError, match=r"model.adapter: .*'rnk'"):
        parse_study_text(STUDY.replace("r = 8", "rnk = 8"))


def test_a_model_without_an_adapter_is_named_as_before():
    text = STUDY[: STUDY.index("[model]")] + 'model = "linear"\n'
    lines = text.replace("[data]", "").replace("dataset", "data.dataset")
    lines = lines.replace("num_clients", "data.num_clients") + '[[methods]]\nkind = "random"\n'
    short, long = (
        parse_study_text(lines),
        parse_study_text(lines.replace('model = "linear"', 'model.kind = "linear"')),
    )
    assert short == long
    assert "adapter" not in format_study(short)


def test_the_folder_of_a_model_is_looked_for_next_to_the_study_file(stored, tmp_path, monkeypatch):
    (tmp_path / "llama").symlink_to(stored)
    (tmp_path / "mine.toml").write_text(STUDY)
    assert load_study(tmp_path / "mine.toml").model.kind == f"hf:{tmp_path / 'llama'}"
    monkeypatch.chdir(tmp_path)
    assert load_study("mine.toml").model.kind == "hf:llama"
