//! Probes if a template requires a system message to be the first message.
//!
//! Like vLLM's (`_detect_merge_inline_system`, `entrypoints/anthropic/serving.py`), it renders a
//! small conversation in a plain Jinja environment.

use minijinja::Value as JinjaValue;
use minijinja::value::Serde;
use serde_json::json;

use super::{RenderLimits, TEMPLATE_NAME, environment, generation_tag};

/// Returns `true` if the template refuses a system message that is not the first, or uses
/// extensions that plain Jinja lacks.
pub(super) fn must_be_first(source: &str) -> bool {
    if generation_tag::rewrite(source) != source {
        return true;
    }
    let prepared = environment::prepare_source(source);
    let fuel = RenderLimits::default().fuel;
    let clock = environment::system_clock();
    let Ok(mut plain) = environment::build(TEMPLATE_NAME, prepared, fuel, clock) else {
        return true;
    };
    plain.remove_global("strftime_now");
    let message = |role: &str| json!({"role": role, "content": "t"});
    let messages = ["system", "user", "system", "user"].map(message);
    let conversation = json!({"messages": messages, "add_generation_prompt": false});
    plain
        .get_template(TEMPLATE_NAME)
        .and_then(|template| template.render(JinjaValue::from(Serde(&conversation))))
        .is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_that_refuses_later_system_needs_it_first() {
        let guarded = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
                       {{ raise_exception('system first') }}{% endif %}{{ m.content }}{% endfor %}";
        assert!(must_be_first(guarded));
        assert!(!must_be_first("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"));
        assert!(!must_be_first("{{ bos_token }}{{ messages | tojson }}"), "variables may be unset");
    }

    #[test]
    fn extensions_of_plain_jinja_count_as_a_refusal() {
        assert!(must_be_first("{{ strftime_now('%Y') }}"));
        assert!(!must_be_first(
            "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}"
        ));
        assert!(must_be_first("{% generation %}{{ messages[0].content }}{% endgeneration %}"));
    }
}
