//! Conversion of jobs to and from messages.

mod head;
mod sampling;

use bytes::Bytes;
use chiasm_backend::{
    CuttableVideo, Job, JobItem, KvTransferParams, ReasoningHints, RequestId, Sampling, Stage,
    TensorFormat, TraceContext, VideoDescription,
};
use chiasm_media::ContentHash;
use chiasm_pipeline::{ItemOrigin, PlannedItem};
use chiasm_types::{MmHash, Modality, Placeholder, TokenId};

use crate::cuts::AcceptedCuts;
use crate::{MAX_MESSAGE_BYTES, proto};

#[cfg(test)]
pub(crate) use head::MAX_ENTRIES;
pub(crate) use head::{claimed_bytes, parse_head, peek_number};
pub(crate) use sampling::SUPPORTS;

/// The template variables that a message may name.
const THINKING_VARIABLES: [&str; 2] = ["thinking", "enable_thinking"];

/// The parts of a job in a message, with planned media items.
#[derive(Debug)]
pub(crate) struct JobParts {
    pub(crate) id: RequestId,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) media: Vec<PlannedItem>,
    pub(crate) sampling: Sampling,
    pub(crate) cache_salt: Option<String>,
    pub(crate) priority: i64,
    pub(crate) trace: Option<TraceContext>,
    pub(crate) reasoning: ReasoningHints,
    pub(crate) stage: Stage,
    pub(crate) embedded: Vec<MmHash>,
    /// The name by which engines know the LoRA adapter.
    pub(crate) adapter: Option<String>,
}

/// The maximum number of continuations of a job, more than a frontend requests. Each is a request
/// of the engine.
pub(crate) const MAX_CHOICES: usize = 1024;

const TOKEN_BYTES: usize = size_of::<u32>();

/// The number of repeats from which a token is written once with a count, which takes eight bytes.
const MIN_REPEATS: usize = 8;

/// The maximum number of tokens of a prompt: as many as a message could hold without repeat counts.
const MAX_TOKENS: usize = MAX_MESSAGE_BYTES / TOKEN_BYTES;

/// Encodes tokens as bytes, with long runs of one token written once.
fn collapse_repeats(tokens: &[TokenId]) -> (Bytes, Vec<proto::Repeats>) {
    let mut once = Vec::with_capacity(size_of_val(tokens));
    let mut repeats = Vec::new();
    for run in tokens.chunk_by(PartialEq::eq) {
        let more = run.len() - 1;
        let times = if more >= MIN_REPEATS {
            repeats
                .push(proto::Repeats { at: (once.len() / TOKEN_BYTES) as u32, more: more as u32 });
            1
        } else {
            run.len()
        };
        (0..times).for_each(|_| once.extend_from_slice(&run[0].0.to_le_bytes()));
    }
    (once.into(), repeats)
}

/// Decodes tokens. `None` if the bytes end within a token, or if the repeats are out of order, of
/// no token, or too many.
fn expand_repeats(once: &[u8], repeats: &[proto::Repeats]) -> Option<Vec<TokenId>> {
    let (once, []) = once.as_chunks::<TOKEN_BYTES>() else { return None };
    let token = |token: &[u8; TOKEN_BYTES]| TokenId(u32::from_le_bytes(*token));
    let more = repeats.iter().map(|repeats| repeats.more as usize).sum::<usize>();
    if once.len() + more > MAX_TOKENS {
        return None;
    }
    let mut all = Vec::with_capacity(once.len() + more);
    let mut from = 0;
    for proto::Repeats { at, more } in repeats {
        let until = *at as usize + 1;
        all.extend(once.get(from..until)?.iter().map(token));
        let last = *all.last()?;
        all.extend(std::iter::repeat_n(last, *more as usize));
        from = until;
    }
    all.extend(once[from..].iter().map(token));
    Some(all)
}

/// The maximum length of a URL that is sent to an agent, in bytes. Some servers accept no longer
/// ones.
const MAX_URL_BYTES: usize = 8 << 10;

/// The details of media items that are sent to an agent beside the items' identities.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MediaDetails {
    /// `true` to send the URLs of files.
    pub(crate) urls: bool,
    /// The format of the engine's image tensors, if tensors may be sent in place of files.
    pub(crate) image_tensors: Option<TensorFormat>,
    /// The videos that are announced as cuts.
    pub(crate) cuts: AcceptedCuts,
}

/// Builds the message of a job, without its number. `None` if an item is too long. An item without
/// a file or a cut is announced as tensors.
pub(crate) fn to_message(job: &Job, prompt: &[TokenId], media: MediaDetails) -> Option<proto::Job> {
    let Job {
        id,
        // Only `prompt` is sent.
        input: _,
        media: items,
        sampling,
        adapter,
        cache_salt,
        priority,
        trace,
        reasoning: ReasoningHints { is_over, variables },
        stage,
        embedded,
    } = job;
    let headers: Vec<_> = trace.iter().flat_map(TraceContext::headers).collect();
    let header = |header| {
        headers.iter().find(|(name, _)| *name == header).map(|(_, value)| (*value).to_owned())
    };
    let (tokens, repeats) = collapse_repeats(prompt);
    Some(proto::Job {
        number: 0,
        request_id: id.as_str().to_owned(),
        tokens,
        repeats,
        media: items.iter().map(|item| item_to_message(item, media)).collect::<Option<_>>()?,
        sampling: Some(sampling::to_message(sampling)),
        cache_salt: cache_salt.clone(),
        priority: *priority,
        traceparent: header("traceparent"),
        tracestate: header("tracestate"),
        reasoning_is_over: *is_over,
        reasoning_variables: variables
            .iter()
            .map(|(name, value)| proto::ReasoningVariable {
                name: (*name).to_owned(),
                value: *value,
            })
            .collect(),
        leaves_prompt: *stage == Stage::Prefill,
        left: match stage {
            Stage::Decode(left) => left.bytes().clone(),
            Stage::Whole | Stage::Encode | Stage::Prefill => Bytes::new(),
        },
        leaves_embeddings: *stage == Stage::Encode,
        embedded: embedded.iter().map(|item| Bytes::copy_from_slice(item.as_bytes())).collect(),
        adapter: adapter.as_ref().map(|adapter| adapter.name.clone()).unwrap_or_default(),
    })
}

/// Parses a job.
///
/// # Errors
/// The field at fault, and what is wrong with it.
pub(crate) fn from_message(message: proto::Job) -> Result<JobParts, (String, String)> {
    let invalid = |field: &str, what: &str| (field.to_owned(), what.to_owned());
    let proto::Job {
        // The call identifies the job by it.
        number: _,
        request_id,
        tokens,
        repeats,
        media,
        sampling,
        cache_salt,
        priority,
        traceparent,
        tracestate,
        reasoning_is_over,
        reasoning_variables,
        leaves_prompt,
        left,
        leaves_embeddings,
        embedded,
        adapter,
    } = message;
    let sampling = sampling.ok_or_else(|| invalid("sampling_params", "is missing"))?;
    let prompt = expand_repeats(&tokens, &repeats);
    let prompt = prompt.ok_or_else(|| invalid("tokens", "are malformed, or too many"))?;
    let length = prompt.len();
    let media = media.into_iter().enumerate().map(|(number, item)| {
        item_from_message(item, length)
            .ok_or_else(|| (format!("media[{number}]"), "is malformed".to_owned()))
    });
    let variable = |proto::ReasoningVariable { name, value }| {
        let known = THINKING_VARIABLES.into_iter().find(|known| *known == name);
        known
            .map(|name| (name, value))
            .ok_or_else(|| invalid("chat_template_kwargs", &format!("'{name}' is unknown")))
    };
    Ok(JobParts {
        id: RequestId::new(&request_id)
            .ok_or_else(|| invalid("request_id", "is not a request id"))?,
        tokens: prompt,
        media: media.collect::<Result<_, _>>()?,
        sampling: sampling::from_message(sampling)
            .ok_or_else(|| invalid("sampling_params", "is malformed"))?,
        cache_salt,
        priority,
        trace: traceparent.and_then(|parent| TraceContext::parse(&parent, tracestate.as_deref())),
        reasoning: ReasoningHints {
            is_over: reasoning_is_over,
            variables: reasoning_variables.into_iter().map(variable).collect::<Result<_, _>>()?,
        },
        stage: match (leaves_prompt, left) {
            _ if leaves_embeddings => Stage::Encode,
            (true, _) => Stage::Prefill,
            (false, left) if left.is_empty() => Stage::Whole,
            (false, left) => Stage::Decode(
                KvTransferParams::new(left).ok_or_else(|| invalid("left", "is too long"))?,
            ),
        },
        embedded: embedded
            .iter()
            .map(|item| hash(item))
            .collect::<Option<_>>()
            .ok_or_else(|| invalid("embedded", "is malformed"))?,
        adapter: Some(adapter).filter(|name| !name.is_empty()),
    })
}

fn item_to_message(item: &JobItem, details: MediaDetails) -> Option<proto::MediaItem> {
    let MediaDetails { urls, image_tensors, cuts } = details;
    let JobItem { modality, hash, placeholder, elements, source } = item;
    let encoded = source.encoded();
    let cut = cuts.cuttable(&**source).map(CuttableVideo::description);
    let content = encoded.as_ref().map(|encoded| &encoded.content);
    let content = content.or(cut.as_ref().map(|cut| &cut.content));
    let kwargs = encoded.as_ref().map(|encoded| &encoded.processor_kwargs);
    let kwargs = kwargs.or(cut.as_ref().map(|cut| &cut.processor_kwargs));
    let cost = image_tensors.and_then(|format| source.processing_cost(format));
    let (width, height) = cost.map_or((0, 0), |cost| cost.image_size);
    let Placeholder { offset, length, is_embed } = placeholder;
    let url = encoded.as_ref().and_then(|encoded| encoded.url.as_deref());
    Some(proto::MediaItem {
        modality: modality.name().to_owned(),
        mm_hash: Bytes::copy_from_slice(hash.as_bytes()),
        content: content.map(|content| Bytes::copy_from_slice(content)).unwrap_or_default(),
        processor_kwargs: kwargs.map(|kwargs| kwargs.to_string()).unwrap_or_default(),
        offset: u32::try_from(*offset).ok()?,
        length: u32::try_from(*length).ok()?,
        embeds: is_embed.as_deref().map(run_lengths).unwrap_or_default(),
        elements: if content.is_none() { *elements } else { 0 },
        url: url.filter(|url| urls && url.len() <= MAX_URL_BYTES).unwrap_or_default().to_owned(),
        width,
        height,
        video: cut.as_ref().map(video_to_message),
    })
}

fn video_to_message(cut: &VideoDescription) -> proto::Video {
    // The content and the processor's settings are those of the item.
    let VideoDescription { content: _, frames, fps, width, height, processor_kwargs: _, io_kwargs } =
        cut;
    proto::Video {
        frames: *frames,
        fps: *fps,
        width: *width,
        height: *height,
        io_kwargs: io_kwargs.to_string(),
    }
}

/// Parses an item of a prompt with `prompt` tokens. `None` if it does not fit into the prompt or is
/// malformed.
fn item_from_message(item: proto::MediaItem, prompt: usize) -> Option<PlannedItem> {
    let proto::MediaItem {
        modality,
        mm_hash,
        content,
        processor_kwargs,
        offset,
        length,
        embeds,
        elements,
        url,
        width,
        height,
        video,
    } = item;
    // Checked before memory is allocated for what a message claims.
    let length = Some(length as usize).filter(|length| (1..=prompt).contains(length))?;
    let is_embed = if embeds.is_empty() { None } else { Some(mask_from_runs(&embeds, length)?) };
    let origin = if content.is_empty() {
        ItemOrigin::Tensors { elements }
    } else {
        let content: [u8; 32] = content.as_ref().try_into().ok()?;
        let url = Some(url).filter(|url| !url.is_empty());
        // A frontend must not name local files or other resources of this machine.
        if !url.as_deref().is_none_or(is_http_url) {
            return None;
        }
        let size = Some((width, height)).filter(|&(width, height)| width > 0 && height > 0);
        match video {
            Some(video) => ItemOrigin::Cut(video_from_message(video, content, processor_kwargs)?),
            None => ItemOrigin::File {
                content: ContentHash::new(content),
                processor_kwargs: serde_json::from_str(&processor_kwargs).ok()?,
                url,
                size,
            },
        }
    };
    Some(PlannedItem {
        modality: Modality::from_name(&modality),
        hash: hash(&mm_hash)?,
        origin,
        placeholder: Placeholder { offset: offset as usize, length, is_embed },
    })
}

/// Parses a video's description; `None` if a property has no possible value.
fn video_from_message(
    video: proto::Video,
    content: [u8; 32],
    processor_kwargs: String,
) -> Option<VideoDescription> {
    let proto::Video { frames, fps, width, height, io_kwargs } = video;
    let is_possible = frames > 0 && fps.is_finite() && fps > 0.0 && width > 0 && height > 0;
    is_possible.then(|| VideoDescription {
        content,
        frames,
        fps,
        width,
        height,
        processor_kwargs: processor_kwargs.into(),
        io_kwargs: io_kwargs.into(),
    })
}

fn is_http_url(url: &str) -> bool {
    url.len() <= MAX_URL_BYTES
        && ["http://", "https://"].into_iter().any(|scheme| url.starts_with(scheme))
}

/// Parses an identity; `None` if it has another length.
pub(crate) fn hash(bytes: &[u8]) -> Option<MmHash> {
    Some(MmHash::new(bytes.try_into().ok()?))
}

/// Returns the run lengths of a mask: first of tokens that don't embed, then of those that do, and
/// so on.
fn run_lengths(mask: &[bool]) -> Vec<u32> {
    let mut runs = Vec::new();
    let mut embeds = false;
    let mut rest = mask;
    while !rest.is_empty() {
        let count = rest.iter().take_while(|embed| **embed == embeds).count();
        runs.push(count as u32);
        rest = &rest[count..];
        embeds = !embeds;
    }
    runs
}

/// Returns the mask with these run lengths; `None` if their sum is not `length`.
fn mask_from_runs(runs: &[u32], length: usize) -> Option<Vec<bool>> {
    let total: u64 = runs.iter().map(|count| u64::from(*count)).sum();
    if total != length as u64 {
        return None;
    }
    let embeds = [false, true].into_iter().cycle();
    Some(
        runs.iter()
            .zip(embeds)
            .flat_map(|(count, embed)| std::iter::repeat_n(embed, *count as usize))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_runs_of_a_token_are_written_once() {
        let prompt = |runs: &[(u32, usize)]| -> Vec<TokenId> {
            runs.iter()
                .flat_map(|&(token, count)| std::iter::repeat_n(TokenId(token), count))
                .collect()
        };
        for (runs, once) in [
            (&[][..], 0),
            (&[(7, 1)], 1),
            (&[(7, 8)], 8),
            (&[(7, 9)], 1),
            (&[(1, 3), (7, 1000), (8, 1), (7, 1000), (2, 2)], 8),
        ] {
            let prompt = prompt(runs);
            let (tokens, repeats) = collapse_repeats(&prompt);
            assert_eq!(tokens.len(), once * TOKEN_BYTES, "{runs:?}");
            assert_eq!(expand_repeats(&tokens, &repeats).unwrap(), prompt);
        }
    }

    #[test]
    fn malformed_repeats_are_refused() {
        let repeats = |at, more| proto::Repeats { at, more };
        let one = [5, 0, 0, 0];
        let two = [5, 0, 0, 0, 6, 0, 0, 0];
        assert_eq!(expand_repeats(&one, &[repeats(0, 2)]).unwrap(), [TokenId(5); 3]);
        assert!(expand_repeats(&one, &[repeats(1, 2)]).is_none());
        assert!(expand_repeats(&one, &[repeats(u32::MAX, 2)]).is_none());
        assert!(expand_repeats(&two, &[repeats(1, 2), repeats(0, 2)]).is_none());
        assert!(expand_repeats(&one, &[repeats(0, u32::MAX)]).is_none());
        assert!(expand_repeats(&two[..7], &[]).is_none());
    }
}
