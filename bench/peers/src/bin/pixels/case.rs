//! What is measured: every model with every picture.

use std::path::{Path, PathBuf};

use serde::Serialize;

/// What a value of the tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Format {
    /// The resized pixels, for an engine that normalises on its device.
    U8,
    /// Normalised, as bfloat16: what vLLM hands an engine that does not normalise.
    Bf16,
    /// Normalised, as float32: what the image processors in transformers return unasked.
    F32,
}

impl Format {
    /// The name that orders to the transformers peer and the results use.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }

    /// Bytes per value.
    pub(crate) const fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// A model whose settings lie in `models/`.
#[derive(Debug)]
pub(crate) struct Model {
    /// Name of the directory and in the results.
    pub(crate) name: &'static str,
    /// `model_type` of its config.json.
    pub(crate) model_type: &'static str,
    /// A repository that publishes these settings.
    pub(crate) repository: &'static str,
    /// Raw pixels first where vLLM normalises on the device.
    formats: &'static [Format],
}

const MODELS: [Model; 4] = [
    Model {
        name: "qwen2_vl",
        model_type: "qwen2_vl",
        repository: "Qwen/Qwen2-VL-7B-Instruct",
        formats: &[Format::U8, Format::F32],
    },
    Model {
        name: "qwen3_vl",
        model_type: "qwen3_vl",
        repository: "Qwen/Qwen3-VL-8B-Instruct",
        formats: &[Format::U8, Format::F32],
    },
    Model { name: "llava_1_5", model_type: "llava", repository: "llava-hf/llava-1.5-7b-hf", formats: &[Format::Bf16] },
    Model {
        name: "llama4",
        model_type: "llama4",
        repository: "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        formats: &[Format::Bf16],
    },
];

/// Sizes in the file names that `make_pictures.py` gives.
const SIZES: [&str; 4] = ["512x512", "1024x1024", "1920x1080", "3840x2160"];
const EXTENSIONS: [&str; 2] = ["jpg", "png"];

/// One model with one picture.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) model: &'static Model,
    pub(crate) format: Format,
    /// The model's directory.
    pub(crate) settings: PathBuf,
    pub(crate) picture: PathBuf,
}

impl Case {
    /// `qwen3_vl 1920x1080.jpg u8`
    pub(crate) fn name(&self) -> String {
        let picture = self.picture.file_name().unwrap_or_default().to_string_lossy();
        format!("{} {picture} {}", self.model.name, self.format.name())
    }
}

/// All cases, for directories of models and pictures.
pub(crate) fn all(models: &Path, pictures: &Path) -> Vec<Case> {
    let mut cases = Vec::new();
    for model in &MODELS {
        for &format in model.formats {
            for extension in EXTENSIONS {
                cases.extend(SIZES.iter().map(|size| Case {
                    model,
                    format,
                    settings: models.join(model.name),
                    picture: pictures.join(format!("{size}.{extension}")),
                }));
            }
        }
    }
    cases
}
