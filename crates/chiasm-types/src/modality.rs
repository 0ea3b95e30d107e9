use std::fmt;
use std::sync::Arc;

/// The kind of a media item.
///
/// The first three have the names of vLLM's modalities. A model's own processor may add others,
/// such as `vision_chunk`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Modality {
    /// A still image.
    Image,
    /// A video clip.
    Video,
    /// A sound recording.
    Audio,
    /// A modality of the model's own processor, by its name in vLLM.
    Other(Arc<str>),
}

impl Modality {
    /// Returns the name in vLLM's messages, in metrics and in flags.
    pub fn name(&self) -> &str {
        match self {
            Self::Image => "image",
            Self::Video => "video",
            Self::Audio => "audio",
            Self::Other(name) => name,
        }
    }

    /// Returns the modality with this name; an unknown name becomes [`Modality::Other`].
    pub fn from_name(name: &str) -> Self {
        match name {
            "image" => Self::Image,
            "video" => Self::Video,
            "audio" => Self::Audio,
            other => Self::Other(other.into()),
        }
    }
}

impl fmt::Display for Modality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_parses_to_its_modality() {
        for modality in [
            Modality::Image,
            Modality::Video,
            Modality::Audio,
            Modality::Other("vision_chunk".into()),
        ] {
            assert_eq!(Modality::from_name(modality.name()), modality);
        }
    }
}
