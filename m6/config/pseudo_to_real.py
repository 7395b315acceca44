"""What the section ``m6.pseudo_to_real`` cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from m6.architecture.configuration import M6Config
from m6.errors import UserError

if TYPE_CHECKING:
    from m6.config.sections import M6Settings, PseudoToRealSettings

# Keys of m6.pseudo_to_real that belong to one rule of the switch.
_SWITCH_KEYS = {
    "plateau_window_steps": "loss_plateau",
    "plateau_improvement": "loss_plateau",
    "correlation_threshold": "gradient_correlation",
    "correlation_checks": "gradient_correlation",
}


def check_pseudo_to_real(settings: PseudoToRealSettings, model: M6Config, run: M6Settings) -> None:
    """Raises UserError if the section contradicts itself, the model or the rest of the run."""
    total_steps = run.training.total_steps
    if run.init is not None:
        raise UserError(
            "m6.pseudo_to_real: a run that starts from the weights of m6.init has no Pseudo stage; set it to null, or "
            "fine-tune with a JSON of configs/finetune"
        )
    if settings.switch_step >= total_steps:
        raise UserError(
            f"m6.pseudo_to_real.switch_step {settings.switch_step} is not before the end of the run, "
            f"m6.training.total_steps {total_steps}: no step would be left for the Real model; set "
            f"m6.pseudo_to_real.switch_step=1 to {total_steps - 1}, or m6.pseudo_to_real=null"
        )
    if (settings.learning_rate == "rewarm") != (settings.rewarm_steps is not None):
        raise UserError(
            'm6.pseudo_to_real.rewarm_steps belongs to "learning_rate": "rewarm" and is required there; '
            f'learning_rate is "{settings.learning_rate}"'
        )
    for key, switch in _SWITCH_KEYS.items():
        if key in settings.model_fields_set and settings.switch != switch:
            raise UserError(
                f'm6.pseudo_to_real.{key}: "switch": "{settings.switch}" ignores it; it belongs to "{switch}"'
            )
    try:
        settings.sharing(model.num_layers).check(model)
    except UserError as error:
        raise UserError(f"m6.pseudo_to_real: {error}") from None
