"""An exported adapter, loaded by peft alone onto the model that the run began with, is the run's."""

import json
import sys

import pytest
import torch
from tests.hugging import attach_lora
from torch import nn
from typer.testing import CliRunner

import coterie
from coterie.cli.app import app
from coterie.errors import ConfigError, RunExistsError, TranslationError
from coterie.models.layout import NamedModel
from coterie.results.adapter_folder import export_adapter_folder
from coterie.runtime.models import load_models

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
IDS = torch.randint(1, 20, (36, 6), generator=torch.Generator().manual_seed(0))


def make_bert():
    torch.manual_seed(2)  # noqa: TID251
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def train(model, folder=None):
    parts = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    data = coterie.from_arrays(
        parts, torch.arange(36) // 3 % 3, clients=["ann", "bob", "cleo"] * 12
    )
    local = coterie.LocalTraining(steps=3, batch_size=8, lr=0.05)
    settings = coterie.Settings(rounds=1, local=local, engine="loop", check=False)
    method = coterie.Random(num_peers=1)
    return coterie.simulate(data, method, model=model, settings=settings, folder=folder)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The folder of a base model, and that of a run with adapters on it."""
    folder = tmp_path_factory.mktemp("peft")
    make_bert().save_pretrained(folder / "bert")
    adapter = {"kind": "lora", "r": 2, "target": ["query", "value"], "dropout": 0.1}
    model = NamedModel(f"hf:{folder / 'bert'}", {"task": "seq-cls"}, adapter=adapter)
    train(model, folder / "run")
    return folder


def load_plainly(stored, folder):
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        stored / "bert", num_labels=3
    )
    return peft.PeftModel.from_pretrained(base, str(folder)).eval()


@pytest.mark.slow
def test_the_command_writes_a_folder_for_each_client_that_peft_loads(stored, tmp_path):
    out = tmp_path / "adapters"
    arguments = ["export", str(stored / "run"), "--all", "--format", "peft", "--out", str(out)]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0, told.output
    assert sorted(path.name for path in out.iterdir()) == ["ann", "bob", "cleo"]
    models = load_models(stored / "run")
    heads = []
    for client in ("ann", "bob", "cleo"):
        own, loaded = models.model(client), load_plainly(stored, out / client)
        with torch.no_grad():
            found, expected = (one(input_ids=IDS).logits for one in (loaded, own))
        assert float((found - expected).abs().max()) == 0
        heads.append(
            loaded.state_dict()["base_model.model.classifier.modules_to_save.default.bias"]
        )
        config = json.loads((out / client / "adapter_config.json").read_text())
        assert (config["r"], config["base_model_name_or_path"]) == (2, str(stored / "bert"))
    assert not torch.equal(heads[0], heads[1])
    whole = (stored / "bert" / "model.safetensors").stat().st_size
    assert all(path.stat().st_size < whole / 4 for path in out.rglob("*.safetensors"))
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, ConfigError)
    assert "exists; choose another place" in str(again.exception)
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0


def test_a_folder_that_is_no_adapter_is_not_replaced(stored, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    models = load_models(stored / "run")
    for force in (False, True):
        with pytest.raises(RunExistsError, match=r"mine exists; .*(--force|has no adapter_config)"):
            export_adapter_folder(models, "ann", tmp_path / "mine", force=force)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "letter"]


def test_a_model_given_from_python_is_written_too(tmp_path):
    module = attach_lora(make_bert(), 2, target_modules=["query"], task_type="SEQ_CLS")
    run = train(module)
    export_adapter_folder(run.models, "bob", tmp_path / "bob")
    loaded = peft.PeftModel.from_pretrained(make_bert(), str(tmp_path / "bob")).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, run.model("bob")(input_ids=IDS).logits)


def test_an_adapter_with_a_name_of_its_own_is_written_at_the_top_of_its_folder(tmp_path):
    """peft writes it into a folder of its name; peft.PeftModel loads what is at the top."""
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    run = train(peft.get_peft_model(make_bert(), config, adapter_name="hospital"))
    export_adapter_folder(run.models, "bob", tmp_path / "bob")
    assert (tmp_path / "bob/adapter_config.json").is_file()
    assert not (tmp_path / "bob/hospital").exists()
    loaded = peft.PeftModel.from_pretrained(make_bert(), str(tmp_path / "bob")).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, run.model("bob")(input_ids=IDS).logits)


def test_what_peft_does_not_keep_is_named_and_nothing_is_left(tmp_path):
    module = attach_lora(make_bert(), 2, target_modules=["query"], task_type="SEQ_CLS")
    module.base_model.model.bert.embeddings.LayerNorm.weight.requires_grad_(True)
    run = train(module)
    with pytest.raises(TranslationError, match=r"another '.*embeddings.LayerNorm.weight' than"):
        export_adapter_folder(run.models, "bob", tmp_path / "bob")
    assert list(tmp_path.iterdir()) == []


def test_other_models_and_a_missing_package_are_one_line(stored, tmp_path, monkeypatch):
    run = train(lambda: Plain())
    with pytest.raises(
        ConfigError, match=r"format peft writes adapters .* is a Plain: take safetens"
    ):
        export_adapter_folder(run.models, "ann", tmp_path / "ann")
    given = ["export", str(stored / "run"), "-c", "ann", "--format", "peft", "--adapter"]
    assert isinstance(CliRunner().invoke(app, given).exception, ConfigError)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="format peft needs the package peft: pip install"):
        export_adapter_folder(run.models, "ann", tmp_path / "ann")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask):
        return self.head(self.table(input_ids).mean(1))
