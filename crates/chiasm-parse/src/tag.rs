//! Structural tags, with which an engine constrains an answer to calls in the model's own format.
//!
//! They are xgrammar's tags as vLLM 0.33 builds them
//! (`vllm/tool_parsers/structural_tag_registry.py`, and xgrammar's `builtin_structural_tag`).

use serde_json::{Value, json};

/// A function that an answer may call.
#[derive(Clone, Copy, Debug)]
pub struct Function<'a> {
    /// The function's name.
    pub name: &'a str,
    /// The JSON schema of the arguments.
    pub arguments: &'a Value,
}

/// The structural tag of one format.
#[derive(Debug)]
pub(crate) struct TagForm {
    /// The text before and after all calls; both may be empty.
    pub(crate) block: (&'static str, &'static str),
    /// The beginning of a call: the text before and after the name.
    pub(crate) begin: (&'static str, &'static str),
    /// An alternative beginning, before the name, and end of a call.
    pub(crate) alternative: Option<(&'static str, &'static str)>,
    /// The text between the number that follows the name and the arguments. Empty if the format has
    /// no such number.
    pub(crate) number: &'static str,
    /// xgrammar's name of the arguments' syntax.
    pub(crate) style: &'static str,
    /// The end of a call.
    pub(crate) end: &'static str,
    /// The separator between calls.
    pub(crate) separator: &'static str,
    /// The trigger of calls within text: the beginning of the block or of a call, or a prefix of
    /// it.
    pub(crate) trigger: &'static str,
    /// A token that a model needs to write calls this way; may be empty. Models of the same format
    /// without the token write calls in another way.
    pub(crate) token: &'static str,
}

impl TagForm {
    /// Builds the structural tag for calls of these functions; see
    /// [`Format::structural_tag`](crate::Format::structural_tag).
    pub(crate) fn structural_tag(
        &self,
        functions: &[Function<'_>],
        must_call: bool,
        is_single: bool,
    ) -> Value {
        let calls: Vec<Value> =
            functions.iter().flat_map(|function| self.calls(*function)).collect();
        let (begin, end) = self.block;
        let has_block = !begin.is_empty();
        let listed = || {
            json!({
                "type": "tags_with_separator",
                "tags": calls,
                "separator": self.separator,
                "at_least_one": true,
                "stop_after_first": is_single,
            })
        };
        let format = if must_call && has_block {
            json!({"type": "sequence", "elements": [constant(begin), listed(), constant(end)]})
        } else if must_call {
            listed()
        } else {
            let tags = if has_block { vec![tag(begin.trim_start(), listed(), end)] } else { calls };
            json!({
                "type": "triggered_tags",
                "triggers": [self.trigger],
                "tags": tags,
                "at_least_one": false,
                "stop_after_first": is_single,
            })
        };
        json!({"type": "structural_tag", "format": format})
    }

    /// Returns the tags of the alternative variants to write a call.
    fn calls(&self, Function { name, arguments }: Function<'_>) -> Vec<Value> {
        let mut content =
            json!({"type": "json_schema", "json_schema": arguments, "style": self.style});
        if !self.number.is_empty() {
            let number = json!({"type": "regex", "pattern": "\\d+"});
            content =
                json!({"type": "sequence", "elements": [number, constant(self.number), content]});
        }
        let (before_name, after_name) = self.begin;
        let variants = [Some((before_name, self.end)), self.alternative].into_iter().flatten();
        variants
            .map(|(before_name, end)| {
                tag(&format!("{before_name}{name}{after_name}"), content.clone(), end)
            })
            .collect()
    }
}

fn tag(begin: &str, content: Value, end: &str) -> Value {
    json!({"type": "tag", "begin": begin, "content": content, "end": end})
}

fn constant(text: &str) -> Value {
    json!({"type": "const_string", "value": text})
}
