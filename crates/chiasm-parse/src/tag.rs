//! How an engine holds an answer to calls in the model's own format: xgrammar's structural tags, as
//! vLLM 0.33 makes them (`vllm/tool_parsers/structural_tag_registry.py`, and xgrammar's
//! `builtin_structural_tag`).

use serde_json::{Value, json};

/// A function, and the JSON schema that the arguments of its calls are held to.
#[derive(Clone, Copy, Debug)]
pub struct Function<'a> {
    /// Its name.
    pub name: &'a str,
    /// The schema.
    pub arguments: &'a Value,
}

/// The structural tag of one format.
#[derive(Debug)]
pub(crate) struct TagForm {
    /// The text around all calls; both parts may be empty.
    pub(crate) block: (&'static str, &'static str),
    /// The beginning of a call, before and after its name.
    pub(crate) begin: (&'static str, &'static str),
    /// Another beginning and end that it may have.
    pub(crate) other: Option<(&'static str, &'static str)>,
    /// The text between a number, which ends the name, and the arguments; empty without a number.
    pub(crate) number: &'static str,
    /// The syntax of arguments, by xgrammar's name.
    pub(crate) style: &'static str,
    /// The end of a call.
    pub(crate) end: &'static str,
    /// The separator of calls.
    pub(crate) separator: &'static str,
    /// The trigger of calls within text: the beginning of the block or of a call, or a part of it.
    pub(crate) trigger: &'static str,
    /// A token that tells the models that write calls this way from others of the format; may be
    /// empty.
    pub(crate) token: &'static str,
}

impl TagForm {
    /// Builds the structural tag in which these functions are called; see
    /// [`Format::structural_tag`](crate::Format::structural_tag).
    pub(crate) fn structural_tag(
        &self,
        functions: &[Function<'_>],
        has_to_call: bool,
        is_one: bool,
    ) -> Value {
        let calls: Vec<Value> =
            functions.iter().flat_map(|function| self.calls(*function)).collect();
        let (begin, end) = self.block;
        let listed = || {
            json!({
                "type": "tags_with_separator", "tags": calls, "separator": self.separator, "at_least_one": true,
                "stop_after_first": is_one,
            })
        };
        let format = match (has_to_call, begin) {
            (true, "") => listed(),
            (true, _) => {
                json!({"type": "sequence", "elements": [constant(begin), listed(), constant(end)]})
            }
            (false, _) => {
                let tags = if begin.is_empty() {
                    calls
                } else {
                    vec![tag(begin.trim_start(), listed(), end)]
                };
                json!({
                    "type": "triggered_tags", "triggers": [self.trigger], "tags": tags, "at_least_one": false,
                    "stop_after_first": is_one,
                })
            }
        };
        json!({"type": "structural_tag", "format": format})
    }

    /// The ways to write a call.
    fn calls(&self, Function { name, arguments }: Function<'_>) -> Vec<Value> {
        let mut content =
            json!({"type": "json_schema", "json_schema": arguments, "style": self.style});
        if !self.number.is_empty() {
            let number = json!({"type": "regex", "pattern": "\\d+"});
            content =
                json!({"type": "sequence", "elements": [number, constant(self.number), content]});
        }
        let (before, behind) = self.begin;
        let ways = [Some((before, self.end)), self.other].into_iter().flatten();
        ways.map(|(before, end)| tag(&format!("{before}{name}{behind}"), content.clone(), end))
            .collect()
    }
}

fn tag(begin: &str, content: Value, end: &str) -> Value {
    json!({"type": "tag", "begin": begin, "content": content, "end": end})
}

fn constant(text: &str) -> Value {
    json!({"type": "const_string", "value": text})
}
