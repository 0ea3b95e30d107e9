//! Recordings, whose metadata is predicted from their headers, so that routing needs no decoding.
//!
//! vLLM's processor describes how it processes recordings, and how it processed some of them
//! ([`AudioDescription`]). Only if the formulas of `chiasm-audio` give the same results are they
//! used.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use chiasm_audio::{AudioFamily, AudioModel, AudioSize, Extractor, Loader, Recording};
use chiasm_media::EncodedMedia;
use chiasm_processor::{
    AudioDescription, AudioLoader, AudioProbe, ExtractorDescription, Greeting, PromptUpdate,
    ResamplingDescription, Target, UpdateMode,
};
use chiasm_types::{MmHash, Modality, VllmVersion};
use serde_json::Value;

use super::{ItemMetadata, ItemTensors, ProcessorSettings, ReleaseProcessor, VllmProcessorOptions};
use crate::error::RequestError;
use chiasm_cpu::{CpuBudget, price};

/// The vLLM releases whose results the predictions reproduce.
const PREDICTED_RELEASES: [VllmVersion; 2] = [VllmVersion::minor(0, 32), VllmVersion::minor(0, 33)];
/// The only extractor whose settings are known.
const EXTRACTOR: &str = "WhisperFeatureExtractor";
/// The only resampling whose length is known.
const RESAMPLING: &str = "torchaudio";
/// The size of the largest element of a tensor.
const MAX_ELEMENT_BYTES: u64 = 4;

/// The cause for a recording whose prediction was wrong.
const OTHER_LENGTH: Cause = "other_length";

/// The reason why a recording is decoded before its request is routed, as a short name for metrics.
type Cause = &'static str;

impl ReleaseProcessor {
    /// Predicts an item's metadata. Returns `None`, and counts the cause, for a recording that the
    /// processor must make before its request is routed: every recording unless it `may_predict`.
    /// Returns `None` for all other items.
    ///
    /// # Errors
    /// Returns an error if the CPU pool does not do the work.
    pub(super) async fn predict(
        &self,
        encoded: &EncodedMedia,
        settings: &ProcessorSettings,
        may_predict: bool,
    ) -> Result<Option<ItemMetadata>, RequestError> {
        if encoded.modality != Modality::Audio {
            return Ok(None);
        }
        let predictor = if !may_predict {
            // Predictions of this request were wrong already.
            Err(OTHER_LENGTH)
        } else if settings.may_change_recordings() {
            Err("kwargs")
        } else {
            RecordingPredictor::new(settings.greeting(), &self.options)
        };
        let outcome = match predictor {
            Ok(predictor) => {
                let price = price::recording_length(encoded.bytes.len());
                let ticket = CpuBudget::shared().ticket(price)?;
                let file = encoded.bytes.clone();
                self.cpu.run(&ticket, move || predictor.predict(&file)).await?
            }
            Err(cause) => Err(cause),
        };
        match outcome {
            Ok(PredictedRecording { update, elements }) => {
                self.metrics.count_planned_recording();
                Ok(Some(ItemMetadata {
                    updates: vec![update],
                    elements,
                    is_predicted: true,
                    tensors: Mutex::new(Weak::new()),
                }))
            }
            Err(cause) => {
                self.count_whole_recording(cause);
                Ok(None)
            }
        }
    }

    /// Returns `true` if the tensors have the predicted tokens. Replaces the cached metadata if
    /// anything differs.
    pub(super) fn confirm(
        &self,
        key: MmHash,
        metadata: &ItemMetadata,
        tensors: &Arc<ItemTensors>,
    ) -> bool {
        if !metadata.is_predicted {
            return true;
        }
        let made = ItemMetadata::from_tensors(tensors);
        let is_planned = made.updates == metadata.updates;
        if !is_planned || made.elements != metadata.elements {
            self.count_whole_recording(OTHER_LENGTH);
            self.metadata.insert(key, Arc::new(made));
        }
        is_planned
    }

    /// Counts and logs a recording that is made before its request is routed.
    fn count_whole_recording(&self, cause: Cause) {
        tracing::debug!(cause, "vLLM's own processor makes a recording before it is routed");
        self.metrics.count_whole_recording(cause);
    }
}

impl ProcessorSettings {
    /// Returns `true` if the request's settings may change the tokens of recordings.
    fn may_change_recordings(&self) -> bool {
        let io_kwargs = self.io_kwargs.get(Modality::Audio.name()).and_then(Value::as_object);
        !self.processor_kwargs.is_empty() || io_kwargs.is_some_and(|kwargs| !kwargs.is_empty())
    }

    /// Returns `true` if items only replace their markers in prompts of this request.
    pub(super) fn only_replaces_markers(&self) -> bool {
        let greeting = self.greeting();
        let harmless = match family(greeting) {
            Some(family) if !self.uses_audio_in_video() => family.harmless_prompt_methods(),
            _ => &[],
        };
        greeting.own_prompts.iter().all(|method| harmless.contains(&method.as_str()))
    }
}

/// Predicts what the processor of one release will report about recordings.
struct RecordingPredictor {
    model: AudioModel,
    loader: Loader,
    marker: Vec<u32>,
    /// The token that a recording consists of.
    token: u32,
    limits: RecordingLimits,
}

/// The metadata of a recording.
#[derive(Clone, Debug, PartialEq)]
struct PredictedRecording {
    update: PromptUpdate,
    elements: u64,
}

/// The limits beyond which a recording is not predicted. The processor refuses it then.
struct RecordingLimits {
    file_bytes: u64,
    seconds: f64,
    decoded_bytes: u64,
    /// The maximum size of a file and its tensors.
    item_bytes: u64,
}

/// Returns the family of the model's recordings; `None` if it is unknown, or unknown in this
/// release of vLLM.
fn family(greeting: &Greeting) -> Option<AudioFamily> {
    let release = VllmVersion::parse(&greeting.vllm)?;
    if !PREDICTED_RELEASES.contains(&VllmVersion::minor(release.major, release.minor)) {
        return None;
    }
    AudioFamily::from_processor_class(&greeting.audio.as_ref()?.processor)
}

impl RecordingPredictor {
    /// Creates the predictor for a processor.
    ///
    /// # Errors
    /// Returns the cause for which the processor's results can't be predicted.
    fn new(greeting: &Greeting, options: &VllmProcessorOptions) -> Result<Self, Cause> {
        if !options.predicts_recordings {
            return Err("option");
        }
        let family = family(greeting).ok_or("family")?;
        let description = greeting.audio.as_ref().ok_or("family")?;
        let AudioDescription { extractor, resampling, channels, loader, probes, .. } = description;
        let ExtractorDescription { kind, sampling_rate, hop_length, max_samples, features } =
            extractor;
        let ResamplingDescription { method, rate } = resampling;
        let is_known = kind == EXTRACTOR
            && method == RESAMPLING
            && rate == sampling_rate
            && *channels == Some(1);
        let extractor = Extractor {
            sampling_rate: *sampling_rate,
            hop_length: *hop_length,
            max_samples: *max_samples,
            features: *features,
        };
        let model = AudioModel::new(family, extractor).filter(|_| is_known).ok_or("model")?;
        let loader = match loader {
            Some(AudioLoader::Sndfile { sndfile, avformat }) => {
                Loader::Sndfile { sndfile: sndfile.clone(), avformat: *avformat }
            }
            Some(AudioLoader::Torchcodec { ffmpeg }) => Loader::Torchcodec { ffmpeg: *ffmpeg },
            None => return Err("loader"),
        };
        let (marker, token) = probes.first().and_then(parse_update).ok_or("model")?;
        let limits = RecordingLimits::new(description, options);
        let predictor = Self { model, loader, marker, token, limits };
        let is_confirmed = probes.iter().all(|probe| predictor.matches_probe(probe));
        if is_confirmed { Ok(predictor) } else { Err("model") }
    }

    /// Returns `true` if the formulas give the result of a probe.
    fn matches_probe(&self, probe: &AudioProbe) -> bool {
        let AudioProbe { samples, rate, elements, updates } = probe;
        let Ok(size) = self.model.size(*samples, *rate) else { return false };
        let predicted = self.predict_size(size);
        updates.as_slice() == [predicted.update] && *elements == predicted.elements
    }

    fn predict_size(&self, size: AudioSize) -> PredictedRecording {
        let AudioSize { tokens, elements } = size;
        let update = PromptUpdate {
            mode: UpdateMode::Replace,
            target: Target::Tokens(self.marker.clone()),
            full: vec![(self.token, tokens)],
            is_embed: None,
        };
        PredictedRecording { update, elements }
    }

    /// Predicts the metadata of a recording. CPU-bound. Decodes nothing.
    ///
    /// # Errors
    /// Returns the cause for which the processor must make the recording first.
    fn predict(&self, file: &[u8]) -> Result<PredictedRecording, Cause> {
        let file_bytes = file.len() as u64;
        if file_bytes > self.limits.file_bytes {
            return Err("limit");
        }
        let recording = Recording::read(file, &self.loader).map_err(|reason| reason.cause())?;
        let size = self.model.size(recording.samples, recording.rate);
        let size = size.map_err(|reason| reason.cause())?;
        let is_allowed = self.limits.allow(file_bytes, &recording, size);
        if is_allowed { Ok(self.predict_size(size)) } else { Err("limit") }
    }
}

impl RecordingLimits {
    fn new(description: &AudioDescription, options: &VllmProcessorOptions) -> Self {
        let AudioDescription { max_file_mib, max_seconds, max_decoded_bytes, .. } = description;
        let file_bytes = max_file_mib.map_or(u64::MAX, |mib| mib.saturating_mul(1 << 20));
        let duration = options.processor.limits.audio_duration;
        let own_seconds = Some(duration.as_secs_f64()).filter(|_| duration > Duration::ZERO);
        Self {
            file_bytes,
            seconds: own_seconds.into_iter().chain(*max_seconds).fold(f64::INFINITY, f64::min),
            decoded_bytes: max_decoded_bytes.unwrap_or(u64::MAX),
            item_bytes: options.processor.item_bytes,
        }
    }

    fn allow(&self, file_bytes: u64, recording: &Recording, size: AudioSize) -> bool {
        // vLLM decodes to floats of 32 bits.
        let channels = u64::from(recording.channels);
        let decoded_bytes = recording.samples.saturating_mul(4 * channels);
        let tensor_bytes = size.elements.saturating_mul(MAX_ELEMENT_BYTES);
        recording.seconds() <= self.seconds
            && decoded_bytes <= self.decoded_bytes
            && file_bytes.saturating_add(tensor_bytes) <= self.item_bytes
    }
}

/// Returns the marker that a probe replaces, and the token that it consists of.
fn parse_update(probe: &AudioProbe) -> Option<(Vec<u32>, u32)> {
    match probe.updates.as_slice() {
        [
            PromptUpdate {
                mode: UpdateMode::Replace,
                target: Target::Tokens(marker),
                full,
                is_embed: None,
            },
        ] if !marker.is_empty() => match full.as_slice() {
            [(token, _)] => Some((marker.clone(), *token)),
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests;
