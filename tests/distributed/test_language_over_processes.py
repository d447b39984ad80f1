"""Fine-tuning a transformer over processes gives the same result as the simulator."""

import pytest
import torch
from processes import together

pytest.importorskip("transformers", reason="needs the extra nlp")

from readers import NODES, fine_tuned, in_a_process
from tiny_models import learned, write_model

CASES = [
    pytest.param("all", "qg-dsgdm-n", marks=pytest.mark.slow),
    pytest.param("all", "dadam", marks=pytest.mark.slow),
    pytest.param("lora:2", "qg-dadam", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("train", "algorithm"), CASES)
def test_four_nodes_a_process_each_learn_what_the_simulators_do(tmp_path, train, algorithm):
    model = write_model(tmp_path, "distilbert")
    simulated = fine_tuned(model, train, algorithm)
    spread = torch.cat(together(NODES, in_a_process, model, train, algorithm))
    simulated, spread = (x[:, learned(model, train)] for x in (simulated, spread))
    assert simulated.std(dim=0).max() > 1e-4, "the nodes differ"
    assert ((spread - simulated).norm(dim=1) <= 1e-10 * simulated.norm(dim=1)).all()
