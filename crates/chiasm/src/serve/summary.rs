//! The text that a terminal shows when the server is ready.

use std::fmt::Write;

/// Returns the server's URLs, and a request to try.
pub(super) fn summary(base: &str, model: &str, page: Option<&str>, has_keys: bool) -> String {
    let mut summary = format!("ready\n  API   {base}/v1");
    if let Some(page) = page {
        let _ = write!(summary, "\n  page  {page}");
    }
    let body =
        serde_json::json!({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
            .to_string();
    let key = if has_keys { " -H \"authorization: Bearer $KEY\"" } else { "" };
    let _ = write!(
        summary,
        "\n  try   curl -s {base}/v1/chat/completions{key} \
         -H 'content-type: application/json' -d {}",
        shell_quoted(&body)
    );
    summary
}

/// Quotes text as one word of a POSIX shell.
fn shell_quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_survives_shell_quoting() {
        let model = r#"it's "$HOME" \ `x`"#;
        let shown = summary("http://h:1", model, Some("http://h:1/ui/"), true);
        assert!(shown.contains("page  http://h:1/ui/") && shown.contains("Bearer $KEY"), "{shown}");
        let (_, body) = shown.rsplit_once(" -d ").unwrap();
        let echoed = std::process::Command::new("sh")
            .arg("-c")
            .arg(format!("printf %s {body}"))
            .output()
            .unwrap();
        let sent: serde_json::Value = serde_json::from_slice(&echoed.stdout).unwrap();
        assert_eq!(sent["model"], model);
        assert!(!summary("http://h:1", "m", None, false).contains("page"));
    }
}
