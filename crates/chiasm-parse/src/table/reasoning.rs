//! The syntax of reasoning for each reasoning parser.

use crate::syntax::Reasoning;

/// Reasoning between `<think>` and `</think>`, only at the beginning of an answer.
const THINK: Reasoning = Reasoning {
    open: "<think>",
    close: "</think>",
    begins_inside: true,
    may_follow_text: false,
    ends_at_calls: true,
    drops_stray_ends: true,
    trims_end: false,
    label: "",
    thinks_by_default: None,
    stays_in_text: false,
};

/// [`THINK`] without an end at calls. A stray `</think>` stays in the text.
const R1: Reasoning = Reasoning { ends_at_calls: false, drops_stray_ends: false, ..THINK };

/// The syntax of reasoning, by the names of reasoning parsers.
pub(crate) static REASONING: &[(&[&str], Reasoning)] = &[
    (&["qwen3"], THINK),
    (&["kimi_k2", "minimax_m2", "nemotron_v3", "step3p5"], Reasoning { trims_end: true, ..THINK }),
    (&["seed_oss"], Reasoning { open: "<seed:think>", close: "</seed:think>", ..THINK }),
    (&["deepseek_r1", "step5"], R1),
    (&["deepseek_v3"], Reasoning { thinks_by_default: Some(false), ..R1 }),
    (&["holo2"], Reasoning { thinks_by_default: Some(true), ..R1 }),
    (&["step3"], Reasoning { open: "", ..R1 }),
    (
        &["deepseek_v4", "glm45", "glm47", "ling3"],
        Reasoning { may_follow_text: true, trims_end: true, ..THINK },
    ),
    (&["minimax_m2_append_think"], Reasoning { stays_in_text: true, ..THINK }),
    (
        &["gemma4"],
        Reasoning {
            open: "<|channel>",
            close: "<channel|>",
            begins_inside: false,
            may_follow_text: true,
            trims_end: true,
            label: "thought\n",
            ..THINK
        },
    ),
    (
        &["mistral"],
        Reasoning {
            open: "[THINK]",
            close: "[/THINK]",
            begins_inside: false,
            may_follow_text: true,
            trims_end: true,
            ..THINK
        },
    ),
];
