"""Generate made-up notes of four hospitals and a tiny pretrained transformer, for `make run-text` and docs/text.md.

    python examples/notes.py FOLDER

writes FOLDER/hospital-0 to -3, each with its own train.csv and the same test.csv; FOLDER/notes, all notes together
with a column `hospital`; and FOLDER/model, a one-layer BERT that is trained here in a few seconds.

The notes are sentences assembled from the lists below, identical on every call. They describe no real patient. They
show how the parts work together, not how well a model understands medicine. Each hospital has mostly notes of one ward.
"""

import csv
import random
import re
import sys
from pathlib import Path

WARDS = {
    "cardiology": {
        "complaint": [
            "chest pain on climbing stairs", "pressure behind the breastbone", "palpitations at night",
            "a racing heart after coffee", "swollen ankles in the evening", "shortness of breath when lying flat",
            "fainting on exertion", "a skipped beat now and then", "tightness spreading to the left arm",
        ],
        "finding": [
            "a systolic murmur", "an irregular pulse", "raised troponin", "an enlarged left ventricle",
            "ST depression on the trace", "a blood pressure of 170 over 100", "fluid at both lung bases",
        ],
        "plan": ["echocardiography", "a stress test", "a beta blocker", "a Holter for a day", "coronary angiography"],
    },
    "neurology": {
        "complaint": [
            "a sudden headache", "double vision", "numbness of the left hand", "a droop of the mouth",
            "tremor at rest", "fits since childhood", "difficulty finding words", "unsteady walking in the dark",
            "flashes before each headache",
        ],
        "finding": [
            "brisk reflexes on one side", "a stiff neck", "slow finger tapping", "a field defect to the right",
            "loss of vibration sense", "sharp waves in the trace", "a small lesion in the white matter",
        ],
        "plan": ["an MRI of the head", "an EEG", "a lumbar puncture", "a triptan", "levodopa on trial"],
    },
    "orthopaedics": {
        "complaint": [
            "knee pain on climbing stairs", "a fall on the outstretched hand", "stiffness of the hip in the morning",
            "a locking knee", "low back pain after lifting", "a twisted ankle", "pain of the shoulder at night",
            "a snapping sound at the heel", "numbness of the left hand at night",
        ],
        "finding": [
            "a swollen joint", "limited rotation", "tenderness over the scaphoid", "a positive drawer test",
            "a narrow joint space", "a fracture without displacement", "weak toe standing",
        ],
        "plan": ["a cast for six weeks", "physiotherapy", "an X-ray in two planes", "arthroscopy", "a heel raise"],
    },
    "dermatology": {
        "complaint": [
            "an itching rash", "a mole that has grown", "scaling of the elbows", "blisters on both hands",
            "hair falling out in patches", "redness of the cheeks after wine", "a sore that does not heal",
            "weals after a new soap", "brittle nails",
        ],
        "finding": [
            "silvery plaques", "an uneven border", "pustules on red skin", "burrows between the fingers",
            "a pearly nodule", "dry cracked skin", "swollen ankles with brown skin",
        ],
        "plan": ["a biopsy", "a steroid cream", "patch testing", "light therapy", "excision with a margin"],
    },
}
"""Phrases per ward. Some words occur in several wards: stairs, ankles, a numb hand, a trace."""

PATTERNS = [
    "{who} with {complaint} {since}. On examination {finding}.",
    "{complaint} {since}, {course}. {finding} noted.",
    "{who}, {course}: {complaint} {since}. Plan: {plan}.",
    "Seen for {complaint}. Found {finding}. {plan} advised.",
    "{since} {complaint}. No fever. {plan} arranged.",
    "{who} reports {complaint}, {course}; {finding}, {plan} to follow.",
]
WHO = ["A man of {age}", "A woman of {age}", "A teacher of {age}", "A farmer of {age}", "A student of {age}"]
SINCE = ["for two days", "for three weeks", "since last summer", "on and off for years", "since this morning"]
COURSE = ["getting worse", "no better with rest", "first episode", "known for long", "worse in the cold", "on no drugs"]

HOSPITALS, EACH, TESTED, READ, OWN = 4, 240, 400, 2000, 0.95
"""Number of hospitals; number of notes per hospital, in the common test set and for pretraining; probability that a
note is of the hospital's own ward and not of a random one."""


def note(rng: random.Random, ward: str) -> str:
    """Generate one note of a ward."""
    parts = {what: rng.choice(phrases) for what, phrases in WARDS[ward].items()}
    parts |= {"since": rng.choice(SINCE), "course": rng.choice(COURSE)}
    parts["who"] = rng.choice(WHO).format(age=rng.randint(19, 90))
    text = rng.choice(PATTERNS).format(**parts)
    return text[0].upper() + text[1:]


def notes(hospital: int) -> list[tuple[str, str]]:
    """Generate a hospital's (ward, note) pairs, mostly of one ward."""
    rng, wards = random.Random(hospital), list(WARDS)
    chosen = [wards[hospital] if rng.random() < OWN else rng.choice(wards) for _ in range(EACH)]
    return [(ward, note(rng, ward)) for ward in chosen]


def write(path: Path, rows: list[tuple[str, ...]], *more: str) -> None:
    """Write rows of label, text and further columns as a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("label", "text", *more), *rows])


def write_model(folder: Path) -> None:
    """Train and save a small BERT. It is pretrained, on further notes without wards, to predict a note's words."""
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel, BertTokenizerFast, logging

    logging.disable_progress_bar()

    rng = random.Random("public")
    texts = [note(rng, rng.choice(list(WARDS))) for _ in range(READ)]
    words = sorted({word for text in texts for word in re.findall(r"\w+|\S", text.lower())})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]     # a trained vocabulary is not reproducible
    wordpiece = BertWordPieceTokenizer({piece: i for i, piece in enumerate(pieces)})
    tokenizer = BertTokenizerFast(tokenizer_object=wordpiece._tokenizer)
    tokenizer.save_pretrained(folder)

    torch.manual_seed(0)
    torch.set_num_threads(1)                                # the order of summation, and so rounding, is reproducible
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=128, pad_token_id=0, initializer_range=0.1, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model, told = BertModel(config), torch.nn.Linear(64, len(tokenizer))
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    present = torch.zeros(len(texts), len(tokenizer)).scatter_(1, inputs["input_ids"], 1.0)
    share = present.mean(dim=0).clamp(1e-3, 1 - 1e-3)
    told.bias.data = (share / (1 - share)).log()           # start at each word's frequency
    optimizer = torch.optim.Adam([*model.parameters(), *told.parameters()], lr=0.003)
    for _ in range(300):
        some = torch.randint(len(texts), (64,))
        found = told(model(**{name: values[some] for name, values in inputs.items()}).pooler_output)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(found, present[some], reduction="sum") / 64
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def main(folder: Path) -> None:
    """Write the hospitals' notes, all notes together, and the model."""
    everybody = [notes(hospital) for hospital in range(HOSPITALS)]
    rng = random.Random("test")
    tested = [(ward, note(rng, ward)) for ward in WARDS for _ in range(TESTED // len(WARDS))]
    for hospital, rows in enumerate(everybody):
        write(folder / f"hospital-{hospital}" / "train.csv", rows)
        write(folder / f"hospital-{hospital}" / "test.csv", tested)
    together = [(*row, f"hospital-{hospital}") for hospital, rows in enumerate(everybody) for row in rows]
    write(folder / "notes" / "train.csv", together, "hospital")
    write(folder / "notes" / "test.csv", tested)
    write_model(folder / "model")
    print(f"wrote {folder}: {HOSPITALS} hospitals with {EACH} notes each, {len(tested)} test notes, and a model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
