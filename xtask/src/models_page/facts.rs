//! What vLLM registers, asked by `python/models_page/registered.py`, and which architectures stand
//! for our families of tests. Kept in the repository, so that the page is held against the code
//! without a vLLM.

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
/// What is asked of a processor at the start of a server is asked here too.
const PROCESSOR: &str = "python/chiasm_processor";
const FACTS: &str = "docs/models.json";

/// Everything on the page that does not stand in this repository's code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Facts {
    #[serde(flatten)]
    pub(super) registered: Registered,
    /// The architecture of the tiny model of each family in [`COMPARED`].
    pub(super) compared: BTreeMap<String, String>,
}

/// What the Python prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Registered {
    /// The release: `0.33.0`.
    pub(super) vllm: String,
    pub(super) architectures: Vec<Architecture>,
}

/// An architecture that takes more than text, as vLLM's code has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Architecture {
    pub(super) name: String,
    /// These are named as in vLLM. It is empty if only a model's files tell.
    pub(super) modalities: BTreeMap<String, Limit>,
    /// The methods with which its processor writes items in prompts in a way of its own; `None` if
    /// a model's files choose the processor.
    pub(super) own_prompts: Option<Vec<String>>,
    /// Whether items are inserted into the prompt, instead of replacing their markers.
    pub(super) inserts: bool,
    /// Whether vLLM's code writes its conversations, and not the model's chat template.
    pub(super) written: bool,
    pub(super) refused: Option<Refusal>,
    /// Why nothing is known of it.
    pub(super) unknown: Option<String>,
}

/// The items of a modality in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Limit {
    /// `None` for any number.
    pub(super) most: Option<u32>,
    /// Otherwise a model's files decide whether it takes any.
    pub(super) certain: bool,
}

/// Why an architecture is not served.
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
    /// Asks vLLM; `models` is the directory of the tiny models.
    pub(super) fn ask(setup: &Setup, env: &VllmEnv, models: &Path) -> Result<Self, Error> {
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

    /// Those that the page was last written of.
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

/// Python in the repository's root; `-B` because a `__pycache__` beside a script would be one more
/// thing to ignore.
fn script(setup: &Setup, env: &VllmEnv) -> std::process::Command {
    let root = &setup.workspace.root;
    let mut python = env.python_command();
    // vLLM and its libraries tell much that is not about this.
    python.envs([("VLLM_LOGGING_LEVEL", "ERROR"), ("PYTHONWARNINGS", "ignore")]);
    python.env("PYTHONPATH", root.join(PROCESSOR)).arg("-B").current_dir(root).stdin(Stdio::null());
    python
}

/// What vLLM makes of a model with images in Mistral's own format
/// (`transformers_utils/configs/mistral.py`).
const OF_MISTRALS_FORMAT: &str = "PixtralForConditionalGeneration";

/// The architecture that vLLM runs a model directory as: that of Mistral's format if it is there,
/// else that in config.json.
fn architecture_of(models: &Path, family: &str) -> Result<String, Error> {
    if models.join(family).join("params.json").is_file() {
        return Ok(OF_MISTRALS_FORMAT.to_owned());
    }
    let path = models.join(family).join("config.json");
    let json = fs::read(&path).map_err(Error::io("read", &path))?;
    let config: Value = serde_json::from_slice(&json)
        .map_err(|source| Error::Json { what: path.display().to_string(), source })?;
    let named = config["architectures"][0].as_str();
    named.map(str::to_owned).ok_or_else(|| Error::Unreadable {
        what: path.display().to_string(),
        printed: config["architectures"].to_string(),
    })
}
