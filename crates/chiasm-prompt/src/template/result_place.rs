//! Probes if a template allows a user message after a tool's result.

use serde_json::json;

use super::{ChatTemplate, RenderOptions};
use crate::{ChatContent, ChatMessage};

/// Renders a small conversation. Returns `true` if the template allows a user message after a
/// tool's result, or refuses all tool results.
pub(super) fn allows_user_after(template: &ChatTemplate) -> bool {
    let message = |role: &str| ChatMessage {
        role: role.to_owned(),
        content: Some(ChatContent::Text("t".to_owned())),
        ..ChatMessage::default()
    };
    // Mistral's templates require an id of nine letters and digits.
    let id = "call00001";
    let call = json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let calls =
        ChatMessage { content: None, tool_calls: Some(json!([call])), ..message("assistant") };
    let result = ChatMessage { tool_call_id: Some(id.to_owned()), ..message("tool") };
    let before = [message("user"), calls, result];
    let mut with_user = before.to_vec();
    with_user.push(message("user"));
    let renders = |messages: &[ChatMessage]| {
        template.render(messages, &[], &RenderOptions::default()).is_ok()
    };
    renders(&with_user) || !renders(&before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::RenderLimits;
    use crate::template::environment;
    use crate::template::source::Source;

    fn allows_user(source: &str) -> bool {
        let source = Source { text: source.to_owned(), origin: "test".to_owned() };
        let clock = environment::system_clock();
        let template =
            ChatTemplate::compile(source, Vec::new(), RenderLimits::default(), clock).unwrap();
        template.allows_user_after_result()
    }

    #[test]
    fn alternating_template_refuses_user_after_result() {
        let alternating = "{% set ns = namespace(i=0) %}{% for m in messages %}\
            {% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}\
            {% if (m.role == 'user') != (ns.i % 2 == 0) %}\
            {{ raise_exception('alternate') }}{% endif %}\
            {% set ns.i = ns.i + 1 %}{% endif %}{{ m.content }}{% endfor %}";
        assert!(!allows_user(alternating));
        assert!(allows_user("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"));
    }

    #[test]
    fn template_without_tools_counts_as_allowing_user() {
        let source = "{% for m in messages %}{% if m.role == 'tool' %}\
            {{ raise_exception('no') }}{% endif %}{% endfor %}";
        assert!(allows_user(source));
    }
}
