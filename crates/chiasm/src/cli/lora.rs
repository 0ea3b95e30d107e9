//! Flags of LoRA adapters, under vLLM's names.

use std::collections::BTreeMap;
use std::str::FromStr;

use chiasm_fleet::adapters::AdapterSource;
use clap::Args;
use clap::builder::BoolishValueParser;
use serde::Deserialize;

#[derive(Debug, Args)]
pub(crate) struct LoraArgs {
    /// LoRA adapters that requests may name as their model: NAME=PATH, or JSON such as {"name":
    /// "a", "path": "/adapters/a"}. PATH is a folder, or the id of an adapter on the Hugging Face
    /// hub. Launched engines get the LoRA flags they need; engines of agents get the adapters given
    /// to chiasm agent
    #[arg(long, env = "CHIASM_LORA_MODULES", value_name = "NAME=PATH", num_args = 1..)]
    pub(crate) lora_modules: Vec<LoraModules>,
    /// Let clients load and unload LoRA adapters, at /v1/load_lora_adapter and
    /// /v1/unload_lora_adapter. Any client can then make engines read any folder
    #[arg(long, env = "VLLM_ALLOW_RUNTIME_LORA_UPDATING", value_parser = BoolishValueParser::new())]
    pub(crate) allow_runtime_lora_updating: bool,
    /// Maximum number of LoRA adapters at a time; launched engines keep as many in memory
    #[arg(
        long,
        visible_alias = "max-cpu-loras",
        env = "CHIASM_MAX_LORA_ADAPTERS",
        default_value_t = 64,
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    pub(crate) max_lora_adapters: u16,
}

impl LoraArgs {
    /// Returns the adapters to serve from the start.
    pub(crate) fn modules(&self) -> impl Iterator<Item = &AdapterSource> {
        self.lora_modules.iter().flat_map(|LoraModules(modules)| modules)
    }

    /// Returns `true` if engines have to support adapters.
    pub(crate) fn needs_adapters(&self) -> bool {
        self.allow_runtime_lora_updating || self.modules().next().is_some()
    }
}

/// The adapters of one argument of `--lora-modules`, usually one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoraModules(pub(crate) Vec<AdapterSource>);

/// vLLM's `LoRAModulePath`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Module {
    name: String,
    path: String,
    /// Ignored. vLLM reports it as the adapter's `parent` if it is a name of the served model,
    /// which is reported in any case.
    #[serde(rename = "base_model_name")]
    _base_model_name: Option<String>,
    #[serde(default)]
    is_3d_lora_weight: bool,
}

/// The error of an invalid value of `--lora-modules`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoraModulesError {
    #[error("expected NAME=PATH or JSON with name and path: {0}")]
    Json(#[from] serde_json::Error),
    /// A JSON object of names and paths.
    #[error("expected {name}={path}")]
    Pair { name: String, path: String },
    #[error("is_3d_lora_weight is not supported")]
    Lora3d,
    #[error("name and path must not be empty")]
    Empty,
}

impl FromStr for LoraModules {
    type Err = LoraModulesError;

    /// Parses `NAME=PATH` in the same cases as vLLM, otherwise a JSON object or a list of objects.
    fn from_str(text: &str) -> Result<Self, LoraModulesError> {
        let text = text.trim();
        let modules = match text.split_once('=') {
            Some((name, path)) if !text.contains(',') && !text.starts_with(['{', '[']) => {
                vec![AdapterSource { name: name.to_owned(), path: path.to_owned() }]
            }
            _ => {
                if let Some((name, path)) = first_pair(text) {
                    return Err(LoraModulesError::Pair { name, path });
                }
                let modules: Vec<Module> = if text.starts_with('[') {
                    serde_json::from_str(text)?
                } else {
                    vec![serde_json::from_str(text)?]
                };
                if modules.iter().any(|module| module.is_3d_lora_weight) {
                    return Err(LoraModulesError::Lora3d);
                }
                let source = |Module { name, path, .. }| AdapterSource { name, path };
                modules.into_iter().map(source).collect()
            }
        };
        if modules.iter().any(|module| module.name.is_empty() || module.path.is_empty()) {
            return Err(LoraModulesError::Empty);
        }
        Ok(Self(modules))
    }
}

/// Returns the first adapter of a JSON object of names and paths, as the mapping `{a: /x}` in a
/// configuration file gives; `None` for other text.
fn first_pair(text: &str) -> Option<(String, String)> {
    let paths: BTreeMap<String, String> = serde_json::from_str(text).ok()?;
    let is_module = paths.contains_key("name") || paths.contains_key("path");
    paths.into_iter().next().filter(|_| !is_module)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn parse(flags: &[&str]) -> Result<LoraArgs, String> {
        let cli = Cli::try_parse_from([&["chiasm", "serve", "m"], flags].concat());
        match cli.map_err(|error| error.to_string())?.command {
            Command::Serve(args) => Ok(args.lora),
            _ => panic!("serve"),
        }
    }

    #[test]
    fn adapters_are_parsed_like_in_vllm() {
        let json =
            r#"{"name": "c", "path": "/c,d", "base_model_name": "m", "is_3d_lora_weight": false}"#;
        let list = r#"[{"name": "d", "path": "/d"}, {"name": "e", "path": "/e"}]"#;
        let args = parse(&[
            "--lora-modules",
            "a=/a",
            "b=/x=y",
            "--lora-modules",
            json,
            list,
            "--port",
            "1",
        ])
        .unwrap();
        let found: Vec<_> =
            args.modules().map(|module| (module.name.as_str(), module.path.as_str())).collect();
        assert_eq!(found, [("a", "/a"), ("b", "/x=y"), ("c", "/c,d"), ("d", "/d"), ("e", "/e")]);
        assert!(args.needs_adapters() && !args.allow_runtime_lora_updating);
        assert!(!parse(&[]).unwrap().needs_adapters());
        assert!(parse(&["--allow-runtime-lora-updating"]).unwrap().needs_adapters());
    }

    #[test]
    fn mapping_of_names_to_paths_is_explained() {
        let error = parse(&["--lora-modules", r#"{"a": "/x"}"#]).unwrap_err();
        assert!(error.contains("expected a=/x"), "{error}");
    }

    #[test]
    fn invalid_adapter_is_refused() {
        let with_3d_weight = r#"{"name": "a", "path": "/a", "is_3d_lora_weight": true}"#;
        for invalid in [
            with_3d_weight,
            "a",
            "=/a",
            "a=",
            "a=/x,y",
            "{}",
            r#"{"name": "a"}"#,
            r#"{"name": "a", "path": "/a", "rank": 8}"#,
        ] {
            let error = parse(&["--lora-modules", invalid]).unwrap_err();
            assert!(error.contains("--lora-modules"), "{invalid}: {error}");
        }
    }
}
