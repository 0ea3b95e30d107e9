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
        let file_keys =
            self.api_key_file.as_deref().map(read_keys).transpose()?.unwrap_or_default();
        let keys: Vec<&str> = self
            .api_key
            .iter()
            .map(String::as_str)
            .chain(file_keys.iter().map(String::as_str))
            .collect();
        if keys.iter().any(|key| key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()))
        {
            let message = "an API key must consist of one or more printable ASCII characters";
            return Err(CliError::Usage(message.to_owned()));
        }
        Ok(ApiKeys::new(keys, self.protect_metrics))
    }
}

/// Reads one key per line, without comments and empty lines.
fn read_keys(path: &Path) -> Result<Vec<String>, CliError> {
    let invalid = |reason: &dyn Display| {
        CliError::Usage(format!("--api-key-file: {}: {reason}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|error| invalid(&error))?;
    let lines =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_owned).collect();
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
    fn keys_of_flags_with_file_are_hidden_in_debug() {
        let shown = keys(&["one"], Some("# two keys\n\n  two \nthree\n")).unwrap();
        assert_eq!(shown, format!("{:?}", ApiKeys::new(["one", "two", "three"], false)));
        assert!(!shown.contains("two"));
        assert_eq!(keys(&[], None).unwrap(), format!("{:?}", ApiKeys::default()));
    }

    #[test]
    fn invalid_key_or_empty_file_is_refused() {
        assert!(keys(&[""], None).is_err());
        assert!(keys(&["a b"], None).is_err());
        assert!(keys(&["ä"], None).is_err());
        assert!(keys(&[], Some("# nothing\n")).unwrap_err().contains("no API key"));
    }
}
