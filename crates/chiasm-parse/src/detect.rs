//! Detection of a model's answer format from its chat template.

/// vLLM's names of the detected parsers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Detected {
    /// The parser of calls.
    pub tool_parser: Option<&'static str>,
    /// The parser of reasoning.
    pub reasoning_parser: Option<&'static str>,
}

/// Rules for the parser of calls: a template that contains all texts of a rule has its parser. The
/// first matching rule wins.
const TOOL_PARSERS: [(&[&str], &str); 15] = [
    (&["<|tool_calls_section_begin|>"], "kimi_k2"),
    (&["<minimax:tool_call>"], "minimax_m2"),
    (&["<function=", "<parameter="], "qwen3_coder"),
    (&["<arg_key>"], "glm45"),
    (&["｜DSML｜function_calls"], "deepseek_v32"),
    (&["｜DSML｜tool_calls"], "deepseek_v4"),
    (&["<｜tool▁calls▁begin｜>", "```json"], "deepseek_v3"),
    (&["<｜tool▁calls▁begin｜>"], "deepseek_v31"),
    (&["<|tool_call>call:"], "gemma4"),
    (&["<start_function_call>"], "functiongemma"),
    (&["[TOOL_CALLS]"], "mistral"),
    (&["<tool_call>"], "hermes"),
    (&["<|python_start|>"], "llama4_pythonic"),
    (&["<|python_tag|>", "parameters"], "llama3_json"),
    (&["<|eot_id|>", "\"parameters\":"], "llama3_json"),
];

/// Detects the parsers of a model's answers from its chat template.
///
/// A false positive for reasoning is harmless: its marker, in the prompt or in the answer, still
/// has to begin it.
pub fn detect(template: &str) -> Detected {
    let has_all = |texts: &[&str]| texts.iter().all(|text| template.contains(text));
    let rule = TOOL_PARSERS.iter().find(|(texts, _)| has_all(texts));
    let tool_parser = rule.map(|(_, parser)| *parser);
    let reasoning_parser = match tool_parser {
        _ if template.contains("<|channel>") => Some("gemma4"),
        _ if template.contains("[THINK]") => Some("mistral"),
        _ if !template.contains("<think>") => None,
        Some(parser @ ("kimi_k2" | "minimax_m2" | "glm45" | "deepseek_v4")) => Some(parser),
        Some("deepseek_v3" | "deepseek_v31") => Some("deepseek_r1"),
        _ => Some("qwen3"),
    };
    Detected { tool_parser, reasoning_parser }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Format;

    #[test]
    fn detected_parsers_are_known() {
        for (texts, parser) in TOOL_PARSERS {
            assert!(Format::new(Some(parser), None).is_ok(), "{parser}");
            let Detected { tool_parser, reasoning_parser } =
                detect(&format!("{} <think>", texts.concat()));
            assert_eq!(tool_parser, Some(parser));
            assert!(Format::new(None, reasoning_parser).is_ok() && reasoning_parser.is_some());
        }
    }

    #[test]
    fn template_without_markers_has_no_parsers() {
        assert_eq!(detect("{{ messages[0].content }}"), Detected::default());
        assert_eq!(detect("<|channel>").reasoning_parser, Some("gemma4"));
    }
}
