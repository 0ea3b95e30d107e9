//! Support for the `{% generation %}` tag of `transformers`, which minijinja lacks.
//!
//! The tag marks the assistant's text for training. For a prompt it only opens a scope. The tag
//! `{% with %}` does the same and treats white space equally, so it replaces the tag. Comments, raw
//! blocks and strings are not changed.

/// Replaces `generation` and `endgeneration` tags by `with` and `endwith`.
pub(super) fn rewrite(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{").filter(|at| *at + 1 < rest.len()) {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let length = match tag.as_bytes()[1] {
            b'#' => tag.find("#}").map_or(tag.len(), |end| end + 2),
            b'{' => expression_length(tag, "}}"),
            b'%' if tag_name(tag) == "raw" => raw_length(tag),
            b'%' => expression_length(tag, "%}"),
            _ => 1,
        };
        let (tag, after) = tag.split_at(length);
        match tag_name(tag) {
            "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Returns the word after `{%`, `{%-` or `{%+`; empty if `tag` does not begin so.
fn tag_name(tag: &str) -> &str {
    let Some(inner) = tag.strip_prefix("{%") else { return "" };
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).trim_start();
    let end = inner.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(inner.len());
    &inner[..end]
}

/// Returns the length of a tag up to and including `close`. A `close` within a string is skipped.
fn expression_length(tag: &str, close: &str) -> usize {
    let mut quote = None;
    let mut escaped = false;
    for (at, c) in tag.char_indices() {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if c == '"' || c == '\'' => quote = Some(c),
            None if tag[at..].starts_with(close) => return at + close.len(),
            None => {}
        }
    }
    tag.len()
}

/// Returns the length of a raw block up to the beginning of its `endraw` tag.
fn raw_length(tag: &str) -> usize {
    tag.match_indices("{%")
        .map(|(at, _)| at)
        .find(|at| tag_name(&tag[*at..]) == "endraw")
        .unwrap_or(tag.len())
}

#[cfg(test)]
mod tests {
    use super::rewrite;

    #[test]
    fn generation_tags_are_replaced() {
        assert_eq!(
            rewrite("a{%- generation -%}b{% endgeneration %}c"),
            "a{%- with -%}b{% endwith %}c"
        );
        assert_eq!(rewrite("{%generation%}"), "{%with%}");
    }

    #[test]
    fn other_source_is_unchanged() {
        for source in [
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{% endraw %}",
            "{{ '{% generation %}' }}",
            "{{ \"\\\"{% generation %}\" }}",
            "{% if generation %}{% endif %}",
            "{% set x = '%}{% generation %}' %}",
            "{ generation",
            "{",
            "{%",
            "é{{",
        ] {
            assert_eq!(rewrite(source), source);
        }
    }
}
