//! Facts from vLLM: the architectures that it registers (`python/models_page/registered.py`), and
//! those of the model families in our tests.
//!
//! The facts are kept in the repository, so that a test can compare the page without vLLM.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Stdio;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::ours::COMPARED;
use crate::child;
use crate::error::Error;
use crate::setup::Setup;
use crate::vllm_env::VllmEnv;
use crate::workspace::Workspace;

const FOLDER: &str = "python/models_page";
/// The package whose code examines processors when a server starts. The script uses the same code.
const PROCESSOR: &str = "python/chiasm_processor";
const FACTS: &str = "docs/models.json";

/// The data of the page that is not in this repository's code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Facts {
    #[serde(flatten)]
    pub(super) registered: Registered,
    /// The architecture of the tiny model of each family in [`COMPARED`].
    pub(super) compared: BTreeMap<String, String>,
}

/// The output of the script.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Registered {
    /// The release of vLLM: `0.33.0`.
    pub(super) vllm: String,
    pub(super) architectures: Vec<Architecture>,
}

/// A multimodal architecture, as vLLM's code describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Architecture {
    pub(super) name: String,
    /// The limits by modality, with vLLM's names. Empty if a model's files decide on the
    /// modalities.
    pub(super) modalities: BTreeMap<String, Limit>,
    /// The methods of its processor that override how items are written in prompts; `None` if a
    /// model's files choose the processor.
    pub(super) own_prompts: Option<Vec<String>>,
    /// `true` if items are inserted into the prompt instead of replacing their markers.
    pub(super) inserts: bool,
    /// `true` if vLLM's code renders conversations, instead of the model's chat template.
    pub(super) written: bool,
    pub(super) refused: Option<Refusal>,
    /// The reason why nothing is known about the architecture.
    pub(super) unknown: Option<String>,
}

/// The limit of items of a modality in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Limit {
    /// The maximum number of items; `None` for no limit.
    pub(super) most: Option<u32>,
    /// `false` if a model's files decide whether it takes any items.
    pub(super) certain: bool,
}

/// The reason why an architecture is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Refusal {
    EncoderDecoder,
    Pooling,
    Transcription,
    OwnTokenizer,
    MistralAudio,
}

impl Facts {
    /// Reads the facts from vLLM and from the tiny models in the directory `models`.
    pub(super) fn from_vllm(setup: &Setup, env: &VllmEnv, models: &Path) -> Result<Self, Error> {
        let mut tests = script(setup, env);
        tests.args(["-m", "unittest", "discover", "--quiet", "-s", FOLDER]);
        child::run(&mut tests, "the tests of python/models_page", &setup.output, &setup.cancel)?;
        let mut python = script(setup, env);
        python.arg(format!("{FOLDER}/registered.py"));
        let printed = child::read(&mut python, "registered.py")?;
        let registered = serde_json::from_str(&printed).map_err(|source| Error::Json {
            what: "what registered.py printed".to_owned(),
            source,
        })?;
        let compared = COMPARED
            .iter()
            .map(|(family, _)| Ok(((*family).to_owned(), architecture_of(models, family)?)));
        Ok(Self { registered, compared: compared.collect::<Result<_, Error>>()? })
    }

    /// Reads the facts from which the page was last written.
    #[cfg(test)]
    pub(super) fn read(workspace: &Workspace) -> Result<Self, Error> {
        let path = workspace.file(FACTS)?;
        let json = fs::read(&path).map_err(Error::io("read", &path))?;
        serde_json::from_slice(&json)
            .map_err(|source| Error::Json { what: FACTS.to_owned(), source })
    }

    pub(super) fn write(&self, workspace: &Workspace) -> Result<(), Error> {
        let path = workspace.root.join(FACTS);
        let json = serde_json::to_string_pretty(self)
            .map_err(|source| Error::Json { what: FACTS.to_owned(), source })?;
        fs::write(&path, json + "\n").map_err(Error::io("write", path))
    }
}

/// Returns a Python command in the repository's root. `-B` avoids `__pycache__` beside the scripts.
fn script(setup: &Setup, env: &VllmEnv) -> std::process::Command {
    let root = &setup.workspace.root;
    let mut python = env.python_command();
    // Hides the log of vLLM and its libraries, which is irrelevant here.
    python.envs([("VLLM_LOGGING_LEVEL", "ERROR"), ("PYTHONWARNINGS", "ignore")]);
    python.env("PYTHONPATH", root.join(PROCESSOR)).arg("-B").current_dir(root).stdin(Stdio::null());
    python
}

/// The architecture of a model with images in Mistral's own format (vLLM's
/// `transformers_utils/configs/mistral.py`).
const MISTRAL_FORMAT_ARCHITECTURE: &str = "PixtralForConditionalGeneration";

/// Returns the architecture that vLLM uses for a tiny model: that of Mistral's format if the model
/// has it, else the one in config.json.
fn architecture_of(models: &Path, family: &str) -> Result<String, Error> {
    if models.join(family).join("params.json").is_file() {
        return Ok(MISTRAL_FORMAT_ARCHITECTURE.to_owned());
    }
    let path = models.join(family).join("config.json");
    let json = fs::read(&path).map_err(Error::io("read", &path))?;
    let config: Value = serde_json::from_slice(&json)
        .map_err(|source| Error::Json { what: path.display().to_string(), source })?;
    let architecture = config["architectures"][0].as_str();
    architecture.map(str::to_owned).ok_or_else(|| Error::Unreadable {
        what: path.display().to_string(),
        printed: config["architectures"].to_string(),
    })
}
