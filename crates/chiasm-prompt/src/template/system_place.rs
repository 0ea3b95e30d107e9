//! Whether a template takes system messages behind others, judged as vLLM judges it
//! (`_detect_merge_inline_system`, `entrypoints/anthropic/serving.py`): it renders a small
//! conversation, in an environment of Jinja alone.

use minijinja::Value as JinjaValue;
use minijinja::value::Serde;
use serde_json::json;

use super::{NAME, RenderLimits, environment, generation_tag};

/// Whether the template refuses a system message that is not the first, or has what Jinja alone
/// does not know.
pub(super) fn is_first_alone(source: &str) -> bool {
    if generation_tag::rewrite(source) != source {
        return true;
    }
    let (fuel, clock) = (RenderLimits::default().fuel, environment::system_clock());
    let Ok(mut bare) =
        environment::environment(NAME, environment::prepare_source(source), fuel, clock)
    else {
        return true;
    };
    bare.remove_global("strftime_now");
    let message = |role: &str| json!({"role": role, "content": "t"});
    let messages = ["system", "user", "system", "user"].map(message);
    let conversation = json!({"messages": messages, "add_generation_prompt": false});
    bare.get_template(NAME)
        .and_then(|template| template.render(JinjaValue::from(Serde(&conversation))))
        .is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_that_raises_for_a_later_system_message_takes_the_first_alone() {
        let guarded = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
                       {{ raise_exception('system first') }}{% endif %}{{ m.content }}{% endfor %}";
        assert!(is_first_alone(guarded));
        assert!(!is_first_alone(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        ));
        assert!(
            !is_first_alone("{{ bos_token }}{{ messages | tojson }}"),
            "variables may be unset"
        );
    }

    #[test]
    fn what_jinja_alone_does_not_know_counts_as_a_refusal() {
        assert!(is_first_alone("{{ strftime_now('%Y') }}"));
        assert!(!is_first_alone(
            "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}"
        ));
        assert!(is_first_alone("{% generation %}{{ messages[0].content }}{% endgeneration %}"));
    }
}
