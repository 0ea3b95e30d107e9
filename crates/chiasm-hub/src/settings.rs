//! Settings from the environment variables of `huggingface_hub` (`constants.py`, version 2.4).

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::header::HeaderValue;
use url::Url;

use crate::HubError;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// The location of the hub and the cache, and how to access them.
#[derive(Clone, Debug)]
pub struct HubSettings {
    /// The cache, which has one folder per model.
    pub cache: PathBuf,
    /// The URL of the hub or of a mirror, `https` or `http`.
    pub endpoint: Url,
    /// The user's token. It is only sent to `endpoint`.
    pub token: Option<Token>,
    /// `true` if no requests are sent.
    pub offline: bool,
    /// A file of PEM certificates that are trusted in addition to those that Mozilla trusts.
    pub certificates: Option<PathBuf>,
    /// The pause before the first retry of a request. It doubles with each further retry.
    pub retry_pause: Duration,
}

/// A user's token. `Debug` does not print it.
#[derive(Clone)]
pub struct Token(HeaderValue);

impl Token {
    /// Returns the value of the header `Authorization`.
    pub(crate) fn header(&self) -> HeaderValue {
        self.0.clone()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl HubSettings {
    /// Reads the settings from this process's environment.
    ///
    /// # Errors
    /// [`HubError::Setting`] for a variable with an unusable value, [`HubError::File`] if the
    /// token's file can't be read.
    pub fn from_env() -> Result<Self, HubError> {
        Self::from_variables(&|name| std::env::var_os(name))
    }

    /// Reads the settings from variables: `HF_HUB_CACHE`, `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`,
    /// `HF_TOKEN_PATH`, `HF_HUB_OFFLINE`, their older names and `SSL_CERT_FILE`.
    ///
    /// # Errors
    /// The errors of [`Self::from_env`].
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let variables = Variables(variable);
        let home = variables.hub_home()?;
        let cache = variables.path("HF_HUB_CACHE")?.or(variables.path("HUGGINGFACE_HUB_CACHE")?);
        Ok(Self {
            cache: cache.unwrap_or_else(|| home.join("hub")),
            endpoint: endpoint(
                &variables.text("HF_ENDPOINT")?.unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned()),
            )?,
            token: variables.token(&home)?,
            offline: variables.is_true("HF_HUB_OFFLINE")?
                || variables.is_true("TRANSFORMERS_OFFLINE")?,
            certificates: variables.path("SSL_CERT_FILE")?,
            retry_pause: Duration::from_secs(1),
        })
    }
}

/// A typed view of environment variables. Empty variables count as unset.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<OsString>);

impl Variables<'_> {
    /// Returns a variable's text.
    fn text(&self, name: &'static str) -> Result<Option<String>, HubError> {
        let text = (self.0)(name).map(|value| value.into_string()).transpose();
        let text =
            text.map_err(|_| HubError::Setting { name, problem: "is not valid UTF-8".to_owned() })?;
        Ok(text.filter(|text| !text.is_empty()))
    }

    fn is_true(&self, name: &'static str) -> Result<bool, HubError> {
        let value = self.text(name)?.unwrap_or_default().to_uppercase();
        Ok(["1", "ON", "YES", "TRUE"].contains(&value.as_str()))
    }

    /// Returns a variable's path. A leading `~` is replaced with the user's home folder.
    fn path(&self, name: &'static str) -> Result<Option<PathBuf>, HubError> {
        let Some(value) = (self.0)(name).filter(|value| !value.is_empty()) else { return Ok(None) };
        match Path::new(&value).strip_prefix("~") {
            Ok(rest) => Ok(Some(self.home(name)?.join(rest))),
            Err(_) => Ok(Some(value.into())),
        }
    }

    /// Returns the user's home folder. `needed_by` is the variable that the error names.
    fn home(&self, needed_by: &'static str) -> Result<PathBuf, HubError> {
        let home = (self.0)("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        home.ok_or_else(|| HubError::Setting {
            name: needed_by,
            problem: format!(
                "depends on HOME, which is not set: set HOME, or {needed_by} to an absolute path"
            ),
        })
    }

    /// Returns the home folder of `huggingface_hub`, which contains the cache and the token.
    fn hub_home(&self) -> Result<PathBuf, HubError> {
        if let Some(home) = self.path("HF_HOME")? {
            return Ok(home);
        }
        let caches = match self.path("XDG_CACHE_HOME")? {
            Some(caches) => caches,
            None => self.home("HF_HOME")?.join(".cache"),
        };
        Ok(caches.join("huggingface"))
    }

    fn token(&self, hub_home: &Path) -> Result<Option<Token>, HubError> {
        for name in ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"] {
            if let Some(text) = self.text(name)?.filter(|text| !text.trim().is_empty()) {
                return token(name, &text).map(Some);
            }
        }
        if self.is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN")? {
            return Ok(None);
        }
        let path = self.path("HF_TOKEN_PATH")?.unwrap_or_else(|| hub_home.join("token"));
        match fs::read_to_string(&path) {
            Ok(text) if text.trim().is_empty() => Ok(None),
            Ok(text) => token("HF_TOKEN_PATH", &text).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(HubError::file(&path, error)),
        }
    }
}

/// Parses the token from the variable `name`.
fn token(name: &'static str, text: &str) -> Result<Token, HubError> {
    let problem = || "contains a token with characters other than printable ASCII".to_owned();
    let text = Some(text.trim()).filter(|text| text.bytes().all(|byte| byte.is_ascii_graphic()));
    let header = text.and_then(|text| HeaderValue::from_str(&format!("Bearer {text}")).ok());
    let mut header = header.ok_or_else(|| HubError::Setting { name, problem: problem() })?;
    header.set_sensitive(true);
    Ok(Token(header))
}

fn endpoint(text: &str) -> Result<Url, HubError> {
    let is_valid = |url: &Url| {
        matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.query().is_none()
            && url.username().is_empty()
    };
    let url = Url::parse(text.trim()).ok().filter(is_valid);
    let problem = || format!("has to be an http or https URL, such as {DEFAULT_ENDPOINT}");
    url.ok_or_else(|| HubError::Setting { name: "HF_ENDPOINT", problem: problem() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<HubSettings, HubError> {
        let find = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        };
        HubSettings::from_variables(&find)
    }

    #[test]
    fn cache_folder_equals_that_of_huggingface_hub() {
        let cache = |variables: &[(&str, &str)]| settings(variables).unwrap().cache;
        assert_eq!(cache(&[("HOME", "/u")]), Path::new("/u/.cache/huggingface/hub"));
        assert_eq!(
            cache(&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x")]),
            Path::new("/x/huggingface/hub")
        );
        assert_eq!(
            cache(&[("HOME", "/u"), ("HF_HOME", "~/h"), ("XDG_CACHE_HOME", "/x")]),
            Path::new("/u/h/hub")
        );
        assert_eq!(
            cache(&[("HF_HOME", "/h"), ("HUGGINGFACE_HUB_CACHE", "/old")]),
            Path::new("/old")
        );
        assert_eq!(
            cache(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c"), ("HUGGINGFACE_HUB_CACHE", "/old")]),
            Path::new("/c")
        );
        assert!(matches!(settings(&[]), Err(HubError::Setting { name: "HF_HOME", .. })));
    }

    #[test]
    fn token_is_read_from_variable_or_file() {
        let home = tempfile::tempdir().unwrap();
        let home = home.path().to_str().unwrap();
        let header = |variables: &[(&str, &str)]| {
            let token = settings(variables).unwrap().token;
            assert!(!format!("{token:?}").contains("secret"));
            token.map(|token| token.header().to_str().unwrap().to_owned())
        };
        assert_eq!(header(&[("HF_HOME", home)]), None);
        fs::write(Path::new(home).join("token"), "secret-file\n").unwrap();
        assert_eq!(header(&[("HF_HOME", home)]).unwrap(), "Bearer secret-file");
        assert_eq!(header(&[("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        assert_eq!(
            header(&[("HF_HOME", home), ("HF_TOKEN", " secret ")]).unwrap(),
            "Bearer secret"
        );
        let error =
            settings(&[("HF_HOME", home), ("HF_TOKEN", "secret\nother")]).unwrap_err().to_string();
        assert!(error.starts_with("HF_TOKEN") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn endpoint_or_offline_is_parsed_as_in_python() {
        let home = ("HF_HOME", "/h");
        let with = |name, value| settings(&[home, (name, value)]);
        assert_eq!(settings(&[home]).unwrap().endpoint.as_str(), "https://huggingface.co/");
        assert_eq!(
            with("HF_ENDPOINT", "http://m:1/a/b/").unwrap().endpoint.as_str(),
            "http://m:1/a/b/"
        );
        for bad in ["ftp://m", "m", "file:///etc", "http://user@m", "http://m?x"] {
            assert!(
                matches!(
                    with("HF_ENDPOINT", bad),
                    Err(HubError::Setting { name: "HF_ENDPOINT", .. })
                ),
                "{bad}"
            );
        }
        for (value, offline) in
            [("1", true), ("true", true), ("yes", true), ("0", false), ("", false)]
        {
            assert_eq!(with("HF_HUB_OFFLINE", value).unwrap().offline, offline, "{value}");
        }
    }
}
