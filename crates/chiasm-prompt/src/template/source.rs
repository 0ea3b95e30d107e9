//! Finds the chat template of a model directory, in the search order of vLLM and `transformers`.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::PromptError;
use crate::model_file::{read_object, read_text};

/// A template's text and its origin.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Source {
    pub(super) text: String,
    pub(super) origin: String,
}

/// Finds the template for conversations without tools; `None` if the directory has none.
///
/// vLLM uses the processor's template before the tokenizer's (`resolve_chat_template`,
/// `vllm/renderers/hf.py`). For a processor an old file, `chat_template.json`, takes precedence
/// over `chat_template.jinja`. A tokenizer ignores that file.
pub(super) fn find(dir: &Path) -> Result<Option<Source>, PromptError> {
    let tokenizer_config = read_object(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
    let has_processor = tokenizer_config.contains_key("processor_class")
        || ["processor_config.json", "preprocessor_config.json"]
            .iter()
            .any(|name| dir.join(name).exists());
    if has_processor
        && let Some(source) = match from_json(dir.join("processor_config.json"), &["default"])? {
            Some(source) => Some(source),
            None => from_json(dir.join("chat_template.json"), &["default"])?,
        }
    {
        return Ok(Some(source));
    }
    match find_tokenizer_template(dir, &["default"])? {
        Some(source) => Ok(Some(source)),
        None => from_json(dir.join("chat_template.json"), &["default"]),
    }
}

/// Finds the template for conversations with tools; `None` if there is none. Only the tokenizer's
/// files are searched.
pub(super) fn find_for_tools(dir: &Path) -> Result<Option<Source>, PromptError> {
    find_tokenizer_template(dir, &["tool_use", "default"])
}

/// Finds the tokenizer's template with the first existing name of `names`.
fn find_tokenizer_template(dir: &Path, names: &[&str]) -> Result<Option<Source>, PromptError> {
    for name in names {
        // `chat_template.jinja` is the template named `default`.
        let unnamed = (*name == "default").then(|| "chat_template.jinja".to_owned());
        for file in unnamed.into_iter().chain([format!("chat_templates/{name}.jinja")]) {
            if let Some(source) = from_file(&dir.join(file))? {
                return Ok(Some(source));
            }
        }
    }
    from_json(dir.join("tokenizer_config.json"), names)
}

/// Loads the template `given`, a file's path or template text. As in vLLM, a value that cannot be
/// opened and has a brace or a line break is template text (`_load_chat_template`,
/// `vllm/renderers/chat_utils/chat_template.py`).
pub(super) fn from_path_or_text(given: &Path) -> Result<Source, PromptError> {
    let source = match from_file(given) {
        Ok(Some(source)) => return Ok(source),
        Ok(None) => io::ErrorKind::NotFound.into(),
        Err(PromptError::Unreadable { source, .. }) => source,
        Err(error) => return Err(error),
    };
    match given.to_str() {
        Some(text) if text.contains(['{', '}', '\n']) => {
            Ok(Source { text: text.to_owned(), origin: "the given template".to_owned() })
        }
        _ => Err(PromptError::NoTemplate { given: given.to_owned(), source }),
    }
}

/// Reads a template file; `None` if there is no such file.
pub(super) fn from_file(path: &Path) -> Result<Option<Source>, PromptError> {
    Ok(read_text(path)?.map(|text| Source { text, origin: path.display().to_string() }))
}

/// Reads the `chat_template` of a JSON file: a string, a list of `{"name", "template"}`, or an
/// object from names to templates. If there are several templates, returns the template with the
/// first existing name of `names`.
fn from_json(path: PathBuf, names: &[&str]) -> Result<Option<Source>, PromptError> {
    let named: Vec<(String, Value)> =
        match read_object(&path)?.and_then(|mut config| config.remove("chat_template")) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(text)) => {
                return Ok(Some(Source { text, origin: path.display().to_string() }));
            }
            Some(Value::Object(named)) => named.into_iter().collect(),
            Some(Value::Array(list)) => list
                .iter()
                .filter_map(|entry| {
                    Some((entry.get("name")?.as_str()?.to_owned(), entry.get("template")?.clone()))
                })
                .collect(),
            Some(_) => {
                let reason = "chat_template must be a string, a list or an object".to_owned();
                return Err(PromptError::BadFile { path, reason });
            }
        };
    let find = |wanted: &&str| named.iter().find(|(name, _)| name == wanted)?.1.as_str();
    match names.iter().find_map(find) {
        Some(text) => {
            Ok(Some(Source { text: text.to_owned(), origin: path.display().to_string() }))
        }
        None => {
            let names: Vec<String> = named.into_iter().map(|(name, _)| name).collect();
            Err(PromptError::NoDefaultTemplate { path, names: names.join(", ") })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Result<Option<String>, PromptError> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("chat_templates")).unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        Ok(find(dir.path())?.map(|source| source.text))
    }

    const CONFIG: (&str, &str) = ("tokenizer_config.json", r#"{"chat_template": "config"}"#);
    const JINJA: (&str, &str) = ("chat_template.jinja", "jinja");
    const JSON: (&str, &str) = ("chat_template.json", r#"{"chat_template": "json"}"#);
    const PROCESSOR: (&str, &str) = ("preprocessor_config.json", "{}");

    #[test]
    fn template_files_precede_config_entries() {
        assert_eq!(found(&[]).unwrap(), None);
        assert_eq!(found(&[CONFIG]).unwrap().as_deref(), Some("config"));
        assert_eq!(found(&[CONFIG, JINJA]).unwrap().as_deref(), Some("jinja"));
        assert_eq!(found(&[CONFIG, JINJA, JSON]).unwrap().as_deref(), Some("jinja"));
        assert_eq!(found(&[CONFIG, JINJA, JSON, PROCESSOR]).unwrap().as_deref(), Some("json"));
        assert_eq!(found(&[JSON]).unwrap().as_deref(), Some("json"));
        assert_eq!(
            found(&[CONFIG, ("chat_templates/default.jinja", "named")]).unwrap().as_deref(),
            Some("named")
        );
        let processor = ("processor_config.json", r#"{"chat_template": "processor"}"#);
        assert_eq!(found(&[JINJA, JSON, processor]).unwrap().as_deref(), Some("processor"));
    }

    #[test]
    fn given_template_is_a_file_or_text() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("{braces}.jinja");
        std::fs::write(&file, "of the file").unwrap();
        assert_eq!(from_path_or_text(&file).unwrap().text, "of the file");
        let long = format!("{}{{{{ x }}}}", "x/".repeat(5000));
        for text in ["{{ messages }}", "a\nb", "}", &long] {
            assert_eq!(from_path_or_text(Path::new(text)).unwrap().text, text);
        }
        for name in ["template.jinja".into(), dir.path().to_owned(), dir.path().join("none")] {
            let error = from_path_or_text(&name).unwrap_err();
            assert!(matches!(error, PromptError::NoTemplate { given, .. } if given == name));
        }
    }

    #[test]
    fn default_is_used_of_named_templates() {
        let list = r#"{"chat_template": [{"name": "tool_use", "template": "t"},
            {"name": "default", "template": "d"}]}"#;
        assert_eq!(found(&[("tokenizer_config.json", list)]).unwrap().as_deref(), Some("d"));
        let error =
            found(&[("tokenizer_config.json", r#"{"chat_template": {"rag": "r"}}"#)]).unwrap_err();
        assert!(
            matches!(&error, PromptError::NoDefaultTemplate { names, .. } if names == "rag"),
            "{error}"
        );
    }

    #[test]
    fn tool_template_is_the_tokenizers() {
        let tool_template = |files: &[(&str, &str)]| {
            let dir = tempfile::tempdir().unwrap();
            std::fs::create_dir(dir.path().join("chat_templates")).unwrap();
            for (name, text) in files {
                std::fs::write(dir.path().join(name), text).unwrap();
            }
            find_for_tools(dir.path()).unwrap().map(|source| source.text)
        };
        let named = r#"{"chat_template": {"default": "d", "tool_use": "t"}}"#;
        assert_eq!(tool_template(&[("tokenizer_config.json", named)]).as_deref(), Some("t"));
        assert_eq!(tool_template(&[CONFIG, JSON, PROCESSOR]).as_deref(), Some("config"));
        assert_eq!(
            tool_template(&[JINJA, ("chat_templates/tool_use.jinja", "use")]).as_deref(),
            Some("use")
        );
        assert_eq!(tool_template(&[JSON, PROCESSOR]), None);
    }

    #[test]
    fn unusable_file_error_names_the_file() {
        for text in ["{", "[]", r#"{"chat_template": 3}"#] {
            let error = found(&[("tokenizer_config.json", text)]).unwrap_err();
            assert!(error.to_string().contains("tokenizer_config.json"), "{error}");
        }
    }
}
