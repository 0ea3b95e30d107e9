//! Flags of access control.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use chiasm_server::ApiKeys;
use clap::Args;

use crate::error::CliError;

#[derive(Clone, Debug, Args)]
pub(crate) struct AccessArgs {
    /// API key that clients send as 'Authorization: Bearer KEY'; any one of several keys is enough.
    /// Users who can list this machine's processes see it: --api-key-file hides it [default: no key
    /// is needed]
    #[arg(long, env = "VLLM_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Vec<String>,
    /// File of API keys, one per line; empty lines and lines that begin with # are ignored
    #[arg(long, env = "CHIASM_API_KEY_FILE", value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Require an API key for /metrics too
    #[arg(long, env = "CHIASM_PROTECT_METRICS")]
    pub(crate) protect_metrics: bool,
}

impl AccessArgs {
    /// Reads the API keys of flags and file.
    ///
    /// # Errors
    /// [`CliError::Usage`] for a key that is empty or not valid in a header, and for a file that
    /// can't be read or has no keys.
    pub(crate) fn keys(&self) -> Result<ApiKeys, CliError> {
        for key in &self.api_key {
            check_key(key, &"--api-key")?;
        }
        let file_keys =
            self.api_key_file.as_deref().map(read_keys).transpose()?.unwrap_or_default();
        let keys = self.api_key.iter().chain(&file_keys).map(String::as_str);
        Ok(ApiKeys::new(keys, self.protect_metrics))
    }
}

/// Checks that a header can contain a key. `source` is the flag, or the line of a file.
fn check_key(key: &str, source: &dyn Display) -> Result<(), CliError> {
    if !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "{source}: expected one or more printable ASCII characters without spaces"
    )))
}

/// Reads one key per line; skips comments and empty lines.
fn read_keys(path: &Path) -> Result<Vec<String>, CliError> {
    let invalid = |reason: &dyn Display| {
        CliError::Usage(format!("--api-key-file: {}: {reason}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|error| invalid(&error))?;
    let mut keys = Vec::new();
    for (line, key) in (1..).zip(text.lines().map(str::trim)) {
        if !key.is_empty() && !key.starts_with('#') {
            check_key(key, &format_args!("--api-key-file {}, line {line}", path.display()))?;
            keys.push(key.to_owned());
        }
    }
    // An empty file is a mistake: without keys, everybody would get access.
    if keys.is_empty() {
        return Err(invalid(&"the file has no API key; put one on each line"));
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(flags: &[&str], file: Option<&str>) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, file.unwrap_or_default()).unwrap();
        let api_key = flags.iter().map(|key| (*key).to_owned()).collect();
        let args = AccessArgs { api_key, api_key_file: file.map(|_| path), protect_metrics: false };
        args.keys().map(|keys| format!("{keys:?}")).map_err(|error| error.to_string())
    }

    #[test]
    fn combined_keys_are_hidden_in_debug() {
        let shown = keys(&["one"], Some("# two keys\n\n  two \nthree\n")).unwrap();
        assert_eq!(shown, format!("{:?}", ApiKeys::new(["one", "two", "three"], false)));
        assert!(!shown.contains("two"));
        assert_eq!(keys(&[], None).unwrap(), format!("{:?}", ApiKeys::default()));
    }

    #[test]
    fn invalid_key_or_empty_file_is_refused() {
        assert!(keys(&[""], None).unwrap_err().starts_with("--api-key: expected"));
        let error = keys(&[], Some("# keys\none\nt w o\n")).unwrap_err();
        assert!(error.contains("/keys, line 3: expected") && !error.contains("t w o"), "{error}");
        assert!(keys(&["a b"], None).is_err());
        assert!(keys(&["ä"], None).is_err());
        assert!(keys(&[], Some("# nothing\n")).unwrap_err().contains("no API key"));
    }
}
