//! Metrics of media items by source, of caches' memory, and of answers that wait for their clients.

use std::sync::atomic::Ordering;

use chiasm_backend::unread::UnreadBudget;
use chiasm_media::MediaCounts;
use chiasm_prompt::TokenCacheCounts;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CauseLabel {
    cause: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct HowLabel {
    how: &'static str,
}

/// A snapshot of media counts and of caches' memory.
#[derive(Clone, Debug)]
pub struct MediaState {
    /// Media items by source.
    pub counts: MediaCounts,
    /// The bytes in memory: encoded media, request bodies, and pixels in messages.
    pub held: u64,
    /// The bytes of processed media that are kept for other engines.
    pub processed: u64,
    /// The counts of the token cache for long texts.
    pub texts: TokenCacheCounts,
}

/// The metrics of media items and of memory.
#[derive(Default)]
pub(super) struct MediaMetrics {
    opened: Family<HowLabel, Counter>,
    fetched: Counter,
    panics: Counter,
    held: Gauge,
    cached: Gauge,
    processed: Gauge,
    texts: Gauge,
    found_tokens: Counter,
    unread: Gauge,
    cut: Counter,
    planned_videos: Counter,
    whole_videos: Family<CauseLabel, Counter>,
    replanned: Counter,
    planned_recordings: Counter,
    whole_recordings: Family<CauseLabel, Counter>,
}

/// The causes for which videos go to vLLM's own processor that are not properties of a file or of
/// the model, which have many more.
const WHOLE_VIDEO_CAUSES: [&str; 6] =
    ["agent", "encoder_cache", "limit", "other_frames", "release", "untrusted_kwargs"];

/// The causes for which recordings are made before their requests are routed that are not
/// properties of a file.
const WHOLE_RECORDING_CAUSES: [&str; 7] =
    ["family", "kwargs", "limit", "loader", "model", "option", "other_length"];

impl MediaMetrics {
    /// Creates the series whose labels are known.
    pub(super) fn create_series(&self) {
        for cause in WHOLE_RECORDING_CAUSES {
            drop(self.whole_recordings.get_or_create(&CauseLabel { cause }));
        }
        for cause in WHOLE_VIDEO_CAUSES {
            drop(self.whole_videos.get_or_create(&CauseLabel { cause }));
        }
    }

    pub(super) fn register(&self, r: &mut Registry) {
        r.register(
            "media_opened",
            "Media items requested: data URLs, files, URLs that were fresh, revalidated, fetched, \
             fetched for another request (shared), or had just failed; \
             names of items that were known or unknown",
            self.opened.clone(),
        );
        r.register_with_unit(
            "media_fetched",
            "Bodies fetched from origins",
            Unit::Bytes,
            self.fetched.clone(),
        );
        r.register(
            "media_decoder_panics",
            "Broken images that made a decoder panic, which was caught",
            self.panics.clone(),
        );
        r.register_with_unit(
            "held",
            "Encoded media, request bodies and pixels in messages that are in memory, \
             cached ones too",
            Unit::Bytes,
            self.held.clone(),
        );
        r.register_with_unit(
            "media_cache",
            "Encoded media kept for later requests",
            Unit::Bytes,
            self.cached.clone(),
        );
        r.register_with_unit(
            "processed_cache",
            "Processed pixels kept for other engines",
            Unit::Bytes,
            self.processed.clone(),
        );
        r.register_with_unit(
            "token_cache",
            "Long pieces of prompts and their tokens kept for later requests",
            Unit::Bytes,
            self.texts.clone(),
        );
        r.register(
            "token_cache_found_tokens",
            "Tokens of long pieces of prompts that were found in the token cache",
            self.found_tokens.clone(),
        );
        r.register_with_unit(
            "unread",
            "Answers that wait for their clients, beyond 16 KiB of each answer",
            Unit::Bytes,
            self.unread.clone(),
        );
        r.register(
            "unread_answers_cut",
            "Answers aborted because they had the most unread bytes when the limit was reached",
            self.cut.clone(),
        );
        r.register(
            "videos_planned",
            "Videos of requests that were planned from their containers, without decoding, \
             for each plan class of workers",
            self.planned_videos.clone(),
        );
        r.register(
            "videos_whole",
            "Videos of requests that went to vLLM's own processor as whole files, \
             for all workers or some plan classes, by the cause: \
             a property of the container, the codec or the model that plans do not cover; \
             settings that the request may not change (untrusted_kwargs); \
             too many, too long, too large or too costly (limit); \
             engines of another vLLM release (release), whose encoder may be too small \
             (encoder_cache), or of an agent (agent); other frames than its index says (other_frames)",
            self.whole_videos.clone(),
        );
        r.register(
            "replanned_requests",
            "Times that a request was planned again because a media item differed from its plan",
            self.replanned.clone(),
        );
        r.register(
            "recordings_planned",
            "Recordings whose tokens were read from their headers, without decoding, once for each \
             that is not in memory",
            self.planned_recordings.clone(),
        );
        r.register(
            "recordings_whole",
            "Recordings that vLLM's own processor made before their requests were routed, once for \
             each that is not in memory, by the cause: \
             a property of the file that tells no exact length; \
             another model or vLLM release (family), settings (model) or loader of files (loader) \
             than those whose lengths are known; \
             settings of the request (kwargs); too long or too large (limit); \
             --processor vllm (option); another length than the header told (other_length), \
             which was planned at first",
            self.whole_recordings.clone(),
        );
    }

    /// Counts the planned videos of a request.
    pub(super) fn count_planned_videos(&self, videos: usize) {
        self.planned_videos.inc_by(videos as u64);
    }

    /// Counts videos that went to vLLM's own processor.
    pub(super) fn count_whole_videos(&self, cause: &'static str, videos: usize) {
        self.whole_videos.get_or_create(&CauseLabel { cause }).inc_by(videos as u64);
    }

    /// Counts a request that was planned again.
    pub(super) fn count_replanned(&self) {
        self.replanned.inc();
    }

    #[cfg(feature = "test-support")]
    pub(super) fn replanned(&self) -> u64 {
        self.replanned.get()
    }

    /// Counts a recording that was planned.
    pub(super) fn count_planned_recording(&self) {
        self.planned_recordings.inc();
    }

    /// Counts a recording that was made before its request was routed.
    pub(super) fn count_whole_recording(&self, cause: &'static str) {
        self.whole_recordings.get_or_create(&CauseLabel { cause }).inc();
    }

    #[cfg(feature = "test-support")]
    pub(super) fn planned_recordings(&self) -> u64 {
        self.planned_recordings.get()
    }

    #[cfg(feature = "test-support")]
    pub(super) fn whole_recordings(&self, cause: &'static str) -> u64 {
        self.whole_recordings.get_or_create(&CauseLabel { cause }).get()
    }

    #[cfg(feature = "test-support")]
    pub(super) fn whole_videos(&self, cause: &'static str) -> u64 {
        self.whole_videos.get_or_create(&CauseLabel { cause }).get()
    }

    /// Sets the metrics to a snapshot.
    pub(super) fn refresh(&self, state: &MediaState) {
        let MediaState { counts, held, processed, texts } = state;
        for (how, count) in by_source(counts) {
            self.opened.get_or_create(&HowLabel { how }).inner().store(count, Ordering::Relaxed);
        }
        self.fetched.inner().store(counts.fetched_bytes, Ordering::Relaxed);
        self.panics.inner().store(chiasm_media::caught_panics(), Ordering::Relaxed);
        self.held.set(*held as i64);
        self.cached.set(counts.cached_bytes as i64);
        self.processed.set(*processed as i64);
        self.texts.set(texts.bytes as i64);
        self.found_tokens.inner().store(texts.found_tokens, Ordering::Relaxed);
        let unread = UnreadBudget::global();
        self.unread.set(unread.bytes() as i64);
        self.cut.inner().store(unread.cut_count(), Ordering::Relaxed);
    }
}

/// Returns the number of requested media items, by source.
pub fn by_source(counts: &MediaCounts) -> [(&'static str, u64); 9] {
    [
        ("data", counts.data),
        ("file", counts.files),
        ("fresh", counts.fresh),
        ("revalidated", counts.revalidated),
        ("fetched", counts.fetched),
        ("shared", counts.shared),
        ("failed_again", counts.failed_again),
        ("named", counts.named),
        ("unknown_name", counts.unknown_names),
    ]
}
