"""pFedMe: personal models near a shared one, trained on Moreau envelopes of the losses."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

from coterie._util.settings import PositiveFloat, PositiveInt
from coterie.engine.task import Task
from coterie.exchange.base import Inbox
from coterie.functional.robust import Aggregation
from coterie.methods.base import Info, Round, State
from coterie.methods.ditto import PersonalMemory, PersonalModels
from coterie.methods.server import Averaging, Weights
from coterie.rng import Rng


@final
@dataclass(frozen=True)
class PFedMe(PersonalModels):
    r"""FedAvg on $F_i(w) = \min_\theta f_i(\theta) + \frac{\lambda}{2} \lVert \theta - w \rVert^2$.

    On each batch a client first moves its personal model $\theta_i$ down $f_i(\theta) +
    \frac{\lambda}{2} \lVert \theta - w_i \rVert^2$ in $K$ steps, with the optimizer and the
    learning rate of the run; then $w_i \leftarrow w_i - \eta \lambda (w_i - \theta_i)$. Within a
    round $\theta_i$ goes on from where it was (the paper leaves open where it starts; the authors'
    code does so). The server moves its model towards the mean of the $w_i$. A client uses
    $\theta_i$.

    With SGD the inner steps are stable while `lam` times the learning rate is below 2. A client
    that is not asked in a round rests; in the paper all clients train, and the server averages
    the clients it draws. The authors' code also shrinks $\theta_i$ in each inner step (a weight
    decay of 0.001) and averages by samples; `weight_decay` of the run and `weights` do the same.

    Args:
        lam: $\lambda$: how strongly personal models are drawn to the shared one.
        inner_steps: $K$.
        eta: $\eta$: the step of the shared model at a client.
        beta: $\beta$: the step of the server; 1 takes the mean.
        weights: weights of the clients in the mean: "uniform" as in the paper, or "samples".
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the weighted mean when not given.
    """

    kind: ClassVar[str] = "pfedme"
    summary: ClassVar[str] = (
        "personal models near a shared one, which follows them (Moreau envelopes)"
    )
    references: ClassVar[tuple[str, ...]] = (
        "Dinh, Tran, Nguyen, Personalized federated learning with Moreau envelopes, 2020, "
        "https://arxiv.org/abs/2006.08848",
    )
    lam: PositiveFloat = 15.0
    inner_steps: PositiveInt = 5
    eta: PositiveFloat = 0.005
    beta: PositiveFloat = 1.0
    weights: Weights = "uniform"
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """Uniform, by samples, or by a custom rule, with the server's step."""
        return Averaging(self.weights, lr=self.beta, rule=self.aggregation)

    def count_step_models(self, moments: int) -> int:
        """See `Method.count_step_models`: a gradient, and the way to the shared model."""
        return 2 + moments

    def init_memory(self, task: Task, rng: Rng) -> PersonalMemory:
        """Everybody starts at the first model."""
        return PersonalMemory(task.initial_models(rng).clone())

    def local_update(self, rnd: Round, state: State, reply: Inbox) -> tuple[State, Info]:
        """Approach the envelope's minimum on each batch, and follow it."""
        steps, trainable = rnd.train_stepwise(state), rnd.task.layout.trainable
        shared, model = state.params.clone(), state.params.clone()
        # Steps on `model` move `theta`, steps on `w` move `shared`.
        w, theta = shared[:, :trainable], model[:, :trainable]  # views
        for step in range(steps.num_steps):
            for _ in range(self.inner_steps):
                # K steps down $f_i(\theta) + \frac{\lambda}{2} \lVert \theta - w \rVert^2$, all on
                # one batch.
                gradient = steps.compute_gradient(model, step)
                steps.apply_gradient(model, gradient.add_((theta - w).mul_(self.lam)), step)
            # $w_i \leftarrow w_i - \eta \lambda (w_i - \theta_i)$; clients without a batch in this
            # step rest.
            away = (w - theta).mul_(self.eta * self.lam)
            w.sub_(away.masked_fill_(~steps.active_clients(step).to(away.device)[:, None], 0))
        # Gradients were taken at the personal model: its running statistics are the ones that
        # followed the data.
        shared[:, trainable:] = model[:, trainable:]
        info = steps.finish(shared, model)
        memory = PersonalMemory(model)
        return replace(state, params=shared, memory=memory, moments=steps.optimizer), info
