//! How models write reasoning.

use crate::syntax::Reasoning;

/// Reasoning that an answer begins with, between `<think>` and `</think>`, and of which the rest of
/// the answer says nothing more.
const THINK: Reasoning = Reasoning {
    open: "<think>",
    close: "</think>",
    begins_inside: true,
    may_follow_text: false,
    ends_at_calls: true,
    drops_stray_ends: true,
    trims_end: false,
    label: "",
    thinks_untold: None,
    stays_text: false,
};

/// The same, where marks of calls mean nothing within reasoning, and its end none outside of it.
const R1: Reasoning = Reasoning { ends_at_calls: false, drops_stray_ends: false, ..THINK };

/// How reasoning is written, by the names of reasoning parsers.
pub(crate) static REASONING: &[(&[&str], Reasoning)] = &[
    (&["qwen3"], THINK),
    (&["kimi_k2", "minimax_m2", "nemotron_v3", "step3p5"], Reasoning { trims_end: true, ..THINK }),
    (&["seed_oss"], Reasoning { open: "<seed:think>", close: "</seed:think>", ..THINK }),
    (&["deepseek_r1", "step5"], R1),
    (&["deepseek_v3"], Reasoning { thinks_untold: Some(false), ..R1 }),
    (&["holo2"], Reasoning { thinks_untold: Some(true), ..R1 }),
    (&["step3"], Reasoning { open: "", ..R1 }),
    (
        &["deepseek_v4", "glm45", "glm47", "ling3"],
        Reasoning { may_follow_text: true, trims_end: true, ..THINK },
    ),
    (&["minimax_m2_append_think"], Reasoning { stays_text: true, ..THINK }),
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
