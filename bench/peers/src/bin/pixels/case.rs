//! The cases: every model with every picture.

use std::path::{Path, PathBuf};

/// The type of the tensor's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// The resized pixels, for an engine that normalizes on its device.
    U8,
    /// Normalized values as bfloat16, as vLLM passes them to other engines.
    Bf16,
    /// Normalized values as float32, the default of the image processors in transformers.
    F32,
}

impl Format {
    /// Returns the name in rows and in orders to the peer `transformers`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }

    /// Returns the number of bytes per value.
    pub(crate) const fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// A model with settings in `models/`.
#[derive(Debug)]
pub(crate) struct Model {
    /// The name of the directory, and the name in rows.
    pub(crate) name: &'static str,
    /// The `model_type` of its config.json.
    pub(crate) model_type: &'static str,
    /// A repository that publishes these settings.
    pub(crate) repository: &'static str,
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
    Model {
        name: "llava_1_5",
        model_type: "llava",
        repository: "llava-hf/llava-1.5-7b-hf",
        formats: &[Format::Bf16],
    },
    Model {
        name: "llama4",
        model_type: "llama4",
        repository: "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        formats: &[Format::Bf16],
    },
];

/// The sizes in the names of the pictures of `make_pictures.py`.
const SIZES: [&str; 4] = ["512x512", "1024x1024", "1920x1080", "3840x2160"];

/// A model with a picture.
#[derive(Debug)]
pub(crate) struct Case {
    /// The name in rows, such as `qwen3_vl 1920x1080.jpg u8`.
    pub(crate) name: String,
    pub(crate) model: &'static Model,
    pub(crate) format: Format,
    /// The model's directory.
    pub(crate) settings: PathBuf,
    pub(crate) picture: PathBuf,
}

/// Returns all cases for directories of models and pictures.
pub(crate) fn all(models: &Path, pictures: &Path) -> Vec<Case> {
    let mut cases = Vec::new();
    for model in &MODELS {
        for &format in model.formats {
            for extension in ["jpg", "png"] {
                cases.extend(SIZES.iter().map(|size| Case {
                    name: format!("{} {size}.{extension} {}", model.name, format.name()),
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
