"""`hyperdflash doctor` passes what is healthy, and names each fault that users of drafter trainers report."""

import copy
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hyperdflash.cli import EMBEDDED_DRAFTER, EMBEDDED_TARGET, main
from hyperdflash.generation_hyperdflash import HyperDFlashCandidateGenerator, TargetTap, install_hooks
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.trainer import HyperDFlashTrainingArguments, TrainArguments, blocks, drafting, run_train, states
from hyperdflash.trainer.blocks import block_mask, slot_labels
from hyperdflash.trainer.doctor import walks
from hyperdflash.trainer.doctor.case import Case, run_check
from hyperdflash.trainer.doctor.fits import fits
from hyperdflash.trainer.doctor.passes import check_acceptance, check_causality, measure_acceptance, tie
from hyperdflash.trainer.doctor.prompts import Prompt, read_prompt
from hyperdflash.trainer.doctor.record import drafting_record
from hyperdflash.trainer.doctor.run import diagnose
from hyperdflash.trainer.drafting import draft_hidden_states
from hyperdflash.trainer.states import LiveTargetStates

NEW_TOKENS = 60
MULTI_LAYER = {
    "context_source": "multi_layer",
    "reducer": "fc",
    "path_norm": "none",
    "target_layer_ids": [0, 1],
}
QUESTIONS = ["What does the command `tail` do, and how do I use it?", "How many rolls are left of 24 if 5 are sold?"]


@pytest.fixture(scope="module")
def random_target(make_target):
    install_hooks()
    target = make_target(seed=3)
    with torch.no_grad():  # else the norm's weights are 1, and per-path norms undo it
        target.get_decoder().norm.weight.uniform_(0.1, 3.0, generator=torch.Generator().manual_seed(1))
    return target


@pytest.fixture(scope="module")
def texts(random_target):
    """(prompt, prompt and the target's answer) of two documents."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 60, (1, length), generator=generator) for length in (9, 12)]
    return [(p, random_target.generate(p, max_new_tokens=NEW_TOKENS, do_sample=False)) for p in prompts]


def train(target, drafter, texts, label_shift=0, change=None, steps=30):
    """Some steps on the texts; `change` is done to the context."""
    source = LiveTargetStates(target, drafter.config)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    documents = []
    for _, text in texts:
        found = source(text, torch.ones_like(text))
        if change is not None:
            found.context = change(found.context)
        anchors = torch.arange(1, text.shape[1] - 1 - label_shift).unsqueeze(0)
        labels, counts = slot_labels(text[:, label_shift:], anchors, drafter.config.geometry)
        documents.append((text, found, anchors, labels[counts], counts))
    for _ in range(steps):
        for text, found, anchors, labels, counts in documents:
            hidden = draft_hidden_states(drafter, source.modules, found, text, anchors)
            F.cross_entropy(source.modules.logits(hidden[counts]), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


@pytest.fixture(scope="module")
def build(random_target, texts, make_drafter):
    """A drafter for the target, with a mask token that no text holds and full attention."""
    unused = max(set(range(3, 64)) - {token for _, text in texts for token in text[0].tolist()})

    def build(**overrides):
        fields = {"layer_types": ["full_attention"] * 2, "sliding_window": None, "mask_token_id": unused}
        return make_drafter(random_target, **fields | overrides)

    return build


@pytest.fixture(scope="module")
def trained(random_target, texts, build):
    return train(random_target, build(), texts)


@pytest.fixture(scope="module")
def trained_on_layers(random_target, texts, build):
    return train(random_target, build(**MULTI_LAYER), texts)


@pytest.fixture
def examine(random_target, texts):
    """(faults as `check: message` lines, the diagnosis) of a drafter."""

    def examine(drafter, target=random_target, **known):
        prompts = [Prompt(prompt[0].tolist(), text[0].tolist()) for prompt, text in texts]
        known = {"config_file": drafter.config.to_dict()} | known
        diagnosis = diagnose(Case(target, drafter, prompts, **known), NEW_TOKENS)
        return [f"{each.check}: {each.message}" for each in diagnosis.findings if not each.ok], diagnosis

    return examine


def changed(drafter, **fields):
    """The drafter with other fields in its config, as if it had been loaded with them."""
    drafter = copy.deepcopy(drafter)
    for name, value in fields.items():
        setattr(drafter.config, name, value)
    drafter.rotary_emb = type(drafter.rotary_emb)(drafter.config)
    return drafter


def masks(causal=False, sees_anchor=False):
    """In the place of training's `attention_masks`."""

    def attention_masks(anchors, context_length, config, dtype):
        size = config.block_size
        visible = block_mask(anchors, context_length, config.geometry)
        slots = torch.arange(visible.shape[2]) % size
        if causal:
            visible[..., context_length:] &= slots <= slots.unsqueeze(-1)
        if sees_anchor:
            own = anchors[0].repeat_interleave(size).unsqueeze(-1)
            visible[..., :context_length] |= torch.arange(context_length) == own
        return {"full_attention": torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(dtype).min)}

    return attention_masks


# --- what is healthy ---


def test_a_trained_drafter_is_healthy_and_acceptance_is_the_same_slot_by_slot(trained, examine):
    faults, diagnosis = examine(trained)
    assert faults == []
    found = diagnosis.acceptance.to_dict()
    assert found["training_per_slot"] == found["decoding_per_slot"] == found["statistics"]["acceptance_per_slot"]
    assert found["statistics"]["accepted_length"] > 1.3  # else drafts behind accepted drafts were not looked at
    assert found["drafts"] > 20 and found["differing_drafts"] == found["near_ties"] == found["tolerated_drafts"] == 0
    assert {each.check for each in diagnosis.findings} >= {"acceptance", "layers", "causality", "labels", "fit"}


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
        MULTI_LAYER,
        {"sequential_head_size": 24},
    ],
    ids=["sliding", "multi_layer", "sequential_head"],
)
def test_an_untrained_drafter_is_healthy_and_its_fit_is_not_judged(fields, build, examine):
    faults, diagnosis = examine(build(**fields))
    assert faults == []
    assert "not trained" in diagnosis.findings[-1].message


def test_the_models_are_left_as_they_were(trained, random_target, examine, texts):
    before = random_target.generation_config, trained.generation_config
    examine(trained)
    assert (random_target.generation_config, trained.generation_config) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in random_target.modules())
    assert not any(module._forward_hooks for module in trained.modules())
    assert torch.equal(random_target.generate(texts[0][0], max_new_tokens=NEW_TOKENS, do_sample=False), texts[0][1])


def test_a_repetition_penalty_of_the_target_does_not_part_the_passes(trained, random_target, examine, monkeypatch):
    monkeypatch.setattr(random_target.generation_config, "repetition_penalty", 3.0)
    assert examine(trained)[0] == []


# --- faults in which training's pass and the decoding loop part ---


def tap_behind_the_norm(patch, drafter):
    original = TargetTap.context_states
    patch.setattr(TargetTap, "context_states", lambda tap, n: tap.target.get_decoder().norm(original(tap, n)))


def tap_one_layer_off(patch, drafter):
    original = TargetTap.__init__

    def init(self, target, cache, config, by_index):
        shifted = copy.deepcopy(config)
        shifted.target_layer_ids = [layer + 1 for layer in config.target_layer_ids]
        original(self, target, cache, shifted, by_index)

    patch.setattr(TargetTap, "__init__", init)


def training_one_layer_off(patch, drafter):
    original = LiveTargetStates.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.layer_ids = [layer + 1 for layer in self.layer_ids]

    patch.setattr(LiveTargetStates, "__init__", init)


def causal_decoding(patch, drafter):
    def mask(self, noise_embeds, new_tokens, attention_mask, cache, layer_type):
        size, keys = noise_embeds.shape[1], new_tokens + (cache.get_seq_length() if cache is not None else 0)
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        return F.pad(torch.zeros(size, size).masked_fill(later, -1e9), (keys - size, 0))[None, None]

    patch.setattr(HyperDFlashModel, "_decoding_mask", mask)


def causal_training(patch, drafter):
    patch.setattr(drafting, "attention_masks", masks(causal=True))


def training_sees_the_anchor(patch, drafter):
    patch.setattr(drafting, "attention_masks", masks(sees_anchor=True))


def labels_one_off(patch, drafter):
    patch.setattr(walks, "slot_labels", lambda labels, *rest: slot_labels(labels.roll(-1, dims=1), *rest))


def positions_one_off_in_training(patch, drafter):
    original = blocks._slot_positions
    patch.setattr(blocks, "_slot_positions", lambda anchors, geometry: original(anchors, geometry) + 1)


def rotary_buffer_lost(patch, drafter):
    drafter.rotary_emb.inv_freq.mul_(0.5)


def another_lm_head_in_decoding(patch, drafter):
    original = HyperDFlashCandidateGenerator.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        torch.manual_seed(0)
        self.main_model_output_embeddings = nn.Linear(32, 64, bias=False)

    patch.setattr(HyperDFlashCandidateGenerator, "__init__", init)


def another_mask_token_in_training(patch, drafter):
    original = states.TargetModules.embed_blocks
    patch.setattr(
        states.TargetModules, "embed_blocks", lambda self, tokens, mask, size: original(self, tokens, 5, size)
    )


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (tap_behind_the_norm, "layers: found layer 2 behind the final norm as the context in decoding"),
        (causal_decoding, "causality: found slots [0, 1, 2, 3, 4, 5] that do not see their block's last slot in dec"),
        (causal_training, "causality: found slots [0, 1, 2, 3, 4, 5] that do not see their block's last slot in tra"),
        (training_sees_the_anchor, "causality: found a block that sees the context at or behind its anchor in train"),
        (labels_one_off, "labels: found"),
        (positions_one_off_in_training, "positions: found the slots behind anchor 9 at [10, 11,"),
        (rotary_buffer_lost, "rotary: found other frequencies in the drafter"),
        (another_lm_head_in_decoding, "lm_head: found"),
        (another_mask_token_in_training, "mask_token: found blocks in training"),
    ],
)
def test_a_fault_in_one_pass_is_named(plant, named, trained, examine, monkeypatch):
    drafter = copy.deepcopy(trained)
    plant(monkeypatch, drafter)
    faults, diagnosis = examine(drafter)
    assert any(fault.startswith(named) for fault in faults), faults
    if plant in (labels_one_off, rotary_buffer_lost):  # no draft of one pass alone is another
        assert diagnosis.acceptance.differences == []
    if plant is not rotary_buffer_lost:
        assert faults[0].startswith("acceptance: found")


def test_a_sequential_head_is_healthy_and_one_that_decoding_leaves_out_is_named(
    random_target, texts, build, examine, monkeypatch
):
    drafter = train(random_target, build(sequential_head_size=24), texts)
    faults, diagnosis = examine(drafter)
    assert faults == []
    found = diagnosis.acceptance.to_dict()
    assert found["training_per_slot"] == found["decoding_per_slot"] == found["statistics"]["acceptance_per_slot"]
    assert found["statistics"]["accepted_length"] > 1.3 and found["drafts"] > 20

    def without_head(self, input_ids, hidden_states):
        return self._choose(input_ids, self._logits(hidden_states, input_ids.device))

    monkeypatch.setattr(HyperDFlashCandidateGenerator, "_choose_in_sequence", without_head)
    faults, _ = examine(drafter)
    assert faults[0].startswith("acceptance: found") and any(fault.startswith("lm_head: found") for fault in faults)


@pytest.mark.parametrize(("plant", "where"), [(tap_one_layer_off, "decoding"), (training_one_layer_off, "training")])
def test_layers_one_off_in_one_pass_are_named(plant, where, trained_on_layers, examine, monkeypatch):
    plant(monkeypatch, trained_on_layers)
    faults, diagnosis = examine(trained_on_layers)
    assert f"layers: found layer 1, layer 2 as the context in {where}, wanted layers [0, 1]" in "\n".join(faults)
    assert diagnosis.acceptance.differences


# --- bfloat16: rounding moves drafts near a tie, a fault moves more ---


@pytest.fixture(scope="module")
def embedded_bfloat16():
    install_hooks()
    target = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.bfloat16).eval()
    return target, HyperDFlashModel.from_pretrained(EMBEDDED_DRAFTER, dtype=torch.bfloat16).eval()


@pytest.fixture
def examine_in_bfloat16(embedded_bfloat16):
    """(findings of `acceptance`, what was measured) of the embedded pair on one question."""

    def examine():
        target, drafter = embedded_bfloat16
        prompt = read_prompt({"prompt": [{"role": "user", "content": QUESTIONS[0]}]}, embedded_tokenizer())
        case = Case(target, drafter, [prompt], walks=[walks.walk(target, drafter, prompt.ids, 4 * NEW_TOKENS)])
        case.acceptance = measure_acceptance(case)
        return run_check(check_acceptance, case), case.acceptance

    return examine


def embedded_tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED_TARGET)


def test_rounding_in_bfloat16_is_no_fault(examine_in_bfloat16, embedded_bfloat16):
    (finding,), found = examine_in_bfloat16()
    assert finding.ok and found.drafts > 100 and found.stray == found.drafts // 50
    tolerance = tie(torch.tensor([10.0]), torch.bfloat16)  # 4 roundings of logits of up to 10
    assert tolerance == 0.3125 and max(found.near_ties, default=0.0) <= 2 * tolerance
    assert found.to_dict()["largest_near_tie"] == max(found.near_ties, default=0.0)


@pytest.mark.parametrize("plant", [causal_training, training_sees_the_anchor, positions_one_off_in_training])
def test_a_fault_in_one_pass_is_named_in_bfloat16_too(plant, examine_in_bfloat16, embedded_bfloat16, monkeypatch):
    drafter = embedded_bfloat16[1]
    if plant is causal_training:  # behind a sequential head it moves as few drafts as rounding may: see the next test
        monkeypatch.setitem(drafter._modules, "sequential_head", None)
        monkeypatch.setattr(drafter.config, "sequential_head_size", 0)
    plant(monkeypatch, drafter)
    findings, found = examine_in_bfloat16()
    assert not findings[0].ok and len(found.differences) > found.stray
    assert "their logits" in findings[0].message and f"wanted the same but for {found.stray}" in findings[0].message


def test_a_causal_block_behind_a_sequential_head_is_named_in_bfloat16_by_what_slots_see(
    embedded_bfloat16, monkeypatch
):
    target, drafter = embedded_bfloat16
    assert drafter.sequential_head is not None
    causal_training(monkeypatch, drafter)
    prompt = read_prompt({"prompt": [{"role": "user", "content": QUESTIONS[0]}]}, embedded_tokenizer())
    case = Case(target, drafter, [prompt], walks=[walks.walk(target, drafter, prompt.ids, NEW_TOKENS)])
    (finding,) = run_check(check_causality, case)
    assert "found slots [0, 1, 2, 3, 4, 5] that do not see their block's last slot in training" in finding.message


# --- faults that both passes share: only the weights, or a record, know ---


def test_a_config_that_is_not_that_of_training_is_told_by_the_weights(trained, trained_on_layers, examine):
    cases = [
        (changed(trained, rope_parameters={"rope_type": "default", "rope_theta": 20.0}), "rotary", "of base 10000"),
        (changed(trained_on_layers, target_layer_ids=[1, 2]), "layers", "target_layer_ids [0, 1]"),
    ]
    for drafter, check, what in cases:
        faults, diagnosis = examine(drafter)
        assert diagnosis.acceptance.differences == []  # out of its sight
        assert len(faults) == 1 and faults[0].startswith(f"{check}: found that the drafter fits"), faults
        assert what in faults[0]


def test_a_block_size_that_is_not_that_of_training_fits_less(trained, random_target, texts):
    answers = [(text, prompt.shape[1]) for prompt, text in texts]
    gains = {fit.setting.what: fit.gain for fit in fits(random_target, changed(trained, block_size=5), answers)[1]}
    assert gains["block_size 7"] == max(gains.values()) > 0
    gains = {fit.setting.what: fit.gain for fit in fits(random_target, trained, answers)[1]}
    assert gains["block_size 5"] < 0 and gains["block_size 9"] < 0


def test_mistakes_of_training_are_told_by_the_weights(random_target, texts, build, examine):
    norm = random_target.get_decoder().norm
    faults, _ = examine(train(random_target, build(), texts, label_shift=1))
    # A drafter learns how far its token stands from the slot: slots one position behind fit about as well
    assert len(faults) == 1 and faults[0].startswith(("labels: found that", "positions: found that")), faults
    assert "a+k+1" in faults[0] or "position a+k-1" in faults[0]
    faults, _ = examine(train(random_target, build(), texts, change=lambda states: norm(states).detach()))
    assert len(faults) == 1 and faults[0].startswith("layers: found that the drafter fits"), faults
    assert "final norm" in faults[0]


def test_a_config_that_is_not_the_recorded_one_is_named(trained, examine):
    record = json.loads(json.dumps({"drafting": {"config": drafting_record_of(trained)}}))
    assert examine(trained, record=record)[0] == []
    faults, _ = examine(changed(trained, mask_token_id=4), record=record)
    assert f"record: config.json: mask_token_id: found 4, wanted {trained.config.mask_token_id}" in "\n".join(faults)
    faults, _ = examine(trained, record={"block_size": 9, "num_speculative_tokens": 8})
    assert any(fault.startswith("record: config.json: block_size: found 7, wanted 9") for fault in faults)
    assert any(fault.startswith("block: num_speculative_tokens of the record: found 8, wanted at") for fault in faults)


def drafting_record_of(drafter):
    class NoTemplate:
        chat_template = None

    return drafting_record(drafter.config, NoTemplate())["config"]


# --- faults in files and settings ---


def test_a_field_that_was_filled_in_by_default_is_named(trained, examine):
    file = trained.config.to_dict()
    del file["rope_parameters"]
    faults, _ = examine(trained, config_file=file | {"block_size": None})
    assert [fault[:44] for fault in faults] == [
        "config: config.json: rope_parameters: found n"[:44],
        "config: config.json: block_size: found no va"[:44],
    ]


@pytest.mark.parametrize(("asked", "wanted"), [(9, "at most 6"), (3, "6")])
def test_drafts_a_round_that_are_not_the_blocks_are_named(asked, wanted, trained, examine, monkeypatch):
    monkeypatch.setattr(trained.generation_config, "num_assistant_tokens", asked)
    faults, _ = examine(trained)
    assert len(faults) == 1 and faults[0].startswith("block: num_assistant_tokens of the drafter's generation config")
    assert f"found {asked}, wanted {wanted}" in faults[0]
    if asked < 6:
        assert examine(trained, num_draft_tokens=asked)[0] == []


def test_a_mask_token_that_texts_hold_is_named(trained, texts, examine):
    faults, _ = examine(changed(trained, mask_token_id=texts[0][1][0, 3].item()))
    assert any(fault.startswith("mask_token: mask_token_id: found") and "occurs in" in fault for fault in faults)


def test_an_lm_head_that_is_not_the_checkpoints_is_named(random_target, trained, examine, tmp_path):
    random_target.save_pretrained(tmp_path)
    assert examine(trained, target_folder=tmp_path)[0] == []
    broken = copy.deepcopy(random_target)
    nn.init.normal_(broken.lm_head.weight)
    faults, diagnosis = examine(trained, broken, target_folder=tmp_path)
    assert any(fault.startswith("weights: target: lm_head.weight: found other values") for fault in faults), faults
    assert diagnosis.acceptance.differences == []  # both passes run the same wrong head


def test_weights_that_are_no_numbers_are_named(trained, examine):
    broken = copy.deepcopy(trained)
    nn.init.constant_(broken.reducer.hc_base, float("nan"))
    faults, _ = examine(broken)
    assert (
        len(faults) == 1 and "drafter: found numbers that are not finite in 1 tensors, as reducer.hc_base" in faults[0]
    )


def test_a_drafter_of_another_target_is_named(trained, examine):
    faults, diagnosis = examine(changed(trained, vocab_size=128))
    assert len(faults) == 1 and faults[0].startswith("pair: ") and "vocab_size" in faults[0]
    assert diagnosis.acceptance is None


# --- the command ---


@pytest.fixture
def folders(tmp_path):
    """Copies of the embedded pair, and rows."""
    shutil.copytree(EMBEDDED_DRAFTER, tmp_path / "drafter")
    shutil.copytree(EMBEDDED_TARGET, tmp_path / "target")
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "So."}]}
        for question in QUESTIONS
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def doctor(capsys, folders, *more):
    pair = ("--drafter", str(folders / "drafter"), "--target", str(folders / "target"))
    code = main(["doctor", *pair, "--data", str(folders / "rows.jsonl"), "--max_new_tokens", "16", *more])
    return code, *capsys.readouterr()


def faults_of(out):
    return [f"{each['check']}: {each['message']}" for each in json.loads(out)["findings"] if not each["ok"]]


def test_the_embedded_pair_is_healthy(capsys, folders):
    code, out, _ = doctor(capsys, folders)
    assert code == 0
    assert "WRONG" not in out and "\x1b" not in out
    assert "drafts of" in out and "acceptance by slot" in out
    findings = [line for line in out.splitlines() if line.startswith("ok ")]
    assert len(findings) >= 14  # one line each


def test_faults_of_folders_are_named_and_exit_code_1(capsys, folders):
    config = json.loads((folders / "drafter" / "config.json").read_text())
    del config["rope_parameters"]
    (folders / "drafter" / "config.json").write_text(json.dumps(config))
    weights = load_file(folders / "target" / "model.safetensors")
    head = next(name for name in weights if name in ("lm_head.weight", "head.weight"))
    del weights[head]
    save_file(weights, folders / "target" / "model.safetensors", {"format": "pt"})
    template = (folders / "target" / "chat_template.jinja").read_text()
    (folders / "target" / "chat_template.jinja").write_text(template.replace("'</think>'", "'<think></think>'", 1))
    (folders / "training.json").write_text(json.dumps({"drafting": {"chat_template_sha256": "0" * 64}}))
    code, out, _ = doctor(capsys, folders, "--training", str(folders / "training.json"), "--json")
    faults = faults_of(out)
    assert code == 1
    assert any(fault.startswith("config: config.json: rope_parameters: found no value") for fault in faults)
    assert any(fault.startswith("weights: target: found 1 tensors that loading left fresh") for fault in faults)
    assert any(fault.startswith("chat_template: row 0: found ") and "<think></think>" in fault for fault in faults)
    assert any(fault.startswith("chat_template: found a template") for fault in faults)


def test_training_records_what_doctor_compares(capsys, folders):
    output = folders / "output"
    arguments = HyperDFlashTrainingArguments(
        output_dir=str(output), use_cpu=True, bf16=False, report_to="none", max_steps=1, save_strategy="no"
    )
    script = TrainArguments(*(str(folders / name) for name in ("drafter", "target", "rows.jsonl")))
    run_train(script, arguments)
    capsys.readouterr()
    shutil.rmtree(folders / "drafter")
    output.rename(folders / "drafter")
    code, out, _ = doctor(capsys, folders, "--json")
    assert code == 0, faults_of(out)
    messages = {each["check"]: each["message"] for each in json.loads(out)["findings"]}
    assert "fields are as training recorded" in messages["record"]
    assert messages["chat_template"].endswith("with the template that training recorded")


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--dtype", "int3", "dtype: found 'int3'"),
        ("--rows", "0", "rows: found 0"),
        ("--max_new_tokens", "2", "max_new_tokens: found 2"),
        ("--training", "no-such.json", "training: found no file"),
        ("--data", "./no-such.jsonl", "no-such"),
        ("--device", "no-such-device", "device"),
        ("--target", str(EMBEDDED_DRAFTER), "target: found model_type 'hyperdflash'"),
        ("--drafter", "./no-such", "drafter: found no folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(option, value, named, capsys, folders):
    code, out, err = doctor(capsys, folders, option, value)
    assert code == 2 and out == ""
    assert named in err and err.splitlines()[-1].startswith("hyperdflash doctor: error:")


def test_prompts_of_all_row_forms(folders):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders / "target")
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    wanted = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=True)["input_ids"]
    thinking = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=True, thinking=True)
    whole = tokenizer.apply_chat_template([user, answer], return_dict=True, return_assistant_tokens_mask=True)
    rows = [
        {"messages": [user, answer]},
        {"prompt": [user], "completion": [answer]},
        {"prompt": [user]},
        {"input_ids": whole["input_ids"], "assistant_masks": whole["assistant_masks"]},
    ]
    for row in rows:
        prompt = read_prompt(row, tokenizer)
        assert prompt.ids == wanted and prompt.problem is None
    prompt = read_prompt({"messages": [user, {**answer, "reasoning_content": "so"}]}, tokenizer)
    assert prompt.ids == thinking["input_ids"] and prompt.problem is None
    text = read_prompt({"prompt": "one two", "completion": " three"}, tokenizer)
    assert text.ids == tokenizer("one two")["input_ids"] and text.problem is None
    shifted = {"input_ids": whole["input_ids"], "assistant_masks": [0, *whole["assistant_masks"][:-1]]}
    assert "before the answer" in read_prompt(shifted, tokenizer).problem
