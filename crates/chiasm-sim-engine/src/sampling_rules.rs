//! The sampling parameters that an engine can't decode.

use chiasm_backend::Constraint;
use chiasm_engine::wire::SamplingParams;

/// Returns the field that breaks a rule of `SamplingParams._verify_args` in
/// `vllm/sampling_params.py`, if there is one. vLLM checks the rules while it decodes a request.
pub(crate) fn invalid_field(params: &SamplingParams) -> Option<&'static str> {
    let within = |value: f64, low: f64, high: f64| (low..=high).contains(&value);
    let rules = [
        ("presence_penalty", within(params.presence_penalty, -2.0, 2.0)),
        ("frequency_penalty", within(params.frequency_penalty, -2.0, 2.0)),
        (
            "repetition_penalty",
            params.repetition_penalty.is_finite() && params.repetition_penalty > 0.0,
        ),
        ("temperature", within(params.temperature, 0.0, 2.0)),
        ("top_p", params.top_p > 0.0 && params.top_p <= 1.0),
        ("top_k", params.top_k >= -1),
        ("min_p", within(params.min_p, 0.0, 1.0)),
        ("max_tokens", params.max_tokens >= 1),
        ("min_tokens", params.min_tokens <= params.max_tokens),
        ("logprobs", params.logprobs.is_none_or(|top| top >= -1)),
        ("prompt_logprobs", params.prompt_logprobs.is_none_or(|top| top >= -1)),
    ];
    rules.into_iter().find(|(_, is_kept)| !is_kept).map(|(field, _)| field)
}

/// Returns `true` if a request's constraint seems to compile. vLLM fails a request before its first
/// token if it does not. The check needs no compiler, because the simulated engine does not follow
/// constraints.
pub(crate) fn compiles(params: &SamplingParams) -> bool {
    match params.structured_outputs.as_ref().map(|structured| &structured.constraint) {
        Some(Constraint::Grammar(grammar)) => grammar.contains("root"),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_is_checked_by_field() {
        let fine = SamplingParams::default();
        assert_eq!(invalid_field(&fine), None);
        for (expected, params) in [
            ("max_tokens", SamplingParams { max_tokens: 0, ..fine.clone() }),
            ("min_tokens", SamplingParams { min_tokens: 17, ..fine.clone() }),
            ("temperature", SamplingParams { temperature: f64::NAN, ..fine.clone() }),
            ("temperature", SamplingParams { temperature: 2.1, ..fine.clone() }),
            ("top_p", SamplingParams { top_p: 0.0, ..fine.clone() }),
            ("logprobs", SamplingParams { logprobs: Some(-2), ..fine.clone() }),
        ] {
            assert_eq!(invalid_field(&params), Some(expected));
        }
    }
}
