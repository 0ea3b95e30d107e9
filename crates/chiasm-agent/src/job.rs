//! Jobs as messages, and back.

mod head;
mod sampling;

use bytes::Bytes;
use chiasm_backend::{
    Job, JobItem, Left, ReasoningHints, RequestId, Sampling, Stage, TensorFormat, TraceContext,
};
use chiasm_media::ContentHash;
use chiasm_pipeline::{ItemOrigin, PlannedItem};
use chiasm_types::{MmHash, Modality, Placeholder, TokenId};
use serde_json::Value;

use crate::{MOST_MESSAGE_BYTES, proto};

#[cfg(test)]
pub(crate) use head::MOST_ENTRIES;
pub(crate) use head::{claimed_bytes, head, number_at};
pub(crate) use sampling::SUPPORTS;

/// The variables of templates that a message may name.
const THINKING_VARIABLES: [&str; 2] = ["thinking", "enable_thinking"];

/// What a job of a message is, without its media items.
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
    /// The LoRA adapter, by the name that engines know it by.
    pub(crate) adapter: Option<String>,
}

/// Continuations of a job: more than a frontend asks for. Each is a request of the engine.
pub(crate) const MOST_CHOICES: usize = 1024;

const TOKEN_BYTES: usize = size_of::<u32>();

/// A token that follows itself at least so often stands once: to say how often it is there takes
/// eight bytes.
const FEWEST_REPEATS: usize = 8;

/// Tokens of a prompt at most: as many as a message could have, however often each is repeated.
const MOST_TOKENS: usize = MOST_MESSAGE_BYTES / TOKEN_BYTES;

/// The tokens as bytes, with what follows itself often once.
fn collapsed(tokens: &[TokenId]) -> (Bytes, Vec<proto::Repeats>) {
    let (mut once, mut repeats) = (Vec::with_capacity(size_of_val(tokens)), Vec::new());
    for run in tokens.chunk_by(PartialEq::eq) {
        let more = run.len() - 1;
        let times = if more >= FEWEST_REPEATS {
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

/// The tokens again. `None` if there is half a token, or if the repeats are not in order, of no
/// token, or too many.
fn expanded(once: &[u8], repeats: &[proto::Repeats]) -> Option<Vec<TokenId>> {
    let (once, []) = once.as_chunks::<TOKEN_BYTES>() else { return None };
    let token = |token: &[u8; TOKEN_BYTES]| TokenId(u32::from_le_bytes(*token));
    let more = repeats.iter().map(|repeats| repeats.more as usize).sum::<usize>();
    if once.len() + more > MOST_TOKENS {
        return None;
    }
    let (mut all, mut from) = (Vec::with_capacity(once.len() + more), 0);
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

/// The longest URL that an agent is told: some servers take no longer ones.
const MOST_URL_BYTES: usize = 8 << 10;

/// What an agent is told of media items beside what they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MediaTold {
    /// Whether it is told where files are.
    pub(crate) urls: bool,
    /// What the engine's tensors of images are, if they may be sent in place of files.
    pub(crate) image_tensors: Option<TensorFormat>,
}

/// The message of a job, without its number. `None` if an item is too long. Those that can't be had
/// as files are to be had as tensors.
pub(crate) fn to_message(job: &Job, prompt: &[TokenId], media: MediaTold) -> Option<proto::Job> {
    let Job {
        id,
        // `prompt` is the part of it that is sent.
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
    let header = |wanted| {
        headers.iter().find(|(name, _)| *name == wanted).map(|(_, value)| (*value).to_owned())
    };
    let (tokens, repeats) = collapsed(prompt);
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
            Stage::Decode(left) => left.words().clone(),
            Stage::Whole | Stage::Encode | Stage::Prefill => Bytes::new(),
        },
        leaves_embeddings: *stage == Stage::Encode,
        embedded: embedded.iter().map(|item| Bytes::copy_from_slice(item.as_bytes())).collect(),
        adapter: adapter.as_ref().map(|adapter| adapter.name.clone()).unwrap_or_default(),
    })
}

/// What a message asks for.
///
/// # Errors
/// The field at fault, and what is wrong with it.
pub(crate) fn from_message(message: proto::Job) -> Result<JobParts, (String, String)> {
    let wrong = |field: &str, what: &str| (field.to_owned(), what.to_owned());
    let proto::Job {
        // The call knows the job by it.
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
    let sampling = sampling.ok_or_else(|| wrong("sampling_params", "is missing"))?;
    let prompt = expanded(&tokens, &repeats);
    let prompt = prompt.ok_or_else(|| wrong("tokens", "are malformed, or too many"))?;
    let length = prompt.len();
    let media = media.into_iter().enumerate().map(|(number, item)| {
        item_from_message(item, length)
            .ok_or_else(|| (format!("media[{number}]"), "is malformed".to_owned()))
    });
    let variable = |proto::ReasoningVariable { name, value }| {
        let known = THINKING_VARIABLES.into_iter().find(|known| *known == name);
        known
            .map(|name| (name, value))
            .ok_or_else(|| wrong("chat_template_kwargs", &format!("'{name}' is unknown")))
    };
    Ok(JobParts {
        id: RequestId::new(&request_id).ok_or_else(|| wrong("request_id", "is no id"))?,
        tokens: prompt,
        media: media.collect::<Result<_, _>>()?,
        sampling: sampling::from_message(sampling)
            .ok_or_else(|| wrong("sampling_params", "is malformed"))?,
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
            (false, left) => {
                Stage::Decode(Left::new(left).ok_or_else(|| wrong("left", "is too long"))?)
            }
        },
        embedded: embedded
            .iter()
            .map(|item| hash(item))
            .collect::<Option<_>>()
            .ok_or_else(|| wrong("embedded", "is malformed"))?,
        adapter: Some(adapter).filter(|name| !name.is_empty()),
    })
}

fn item_to_message(item: &JobItem, told: MediaTold) -> Option<proto::MediaItem> {
    let MediaTold { urls, image_tensors } = told;
    let JobItem { modality, hash, placeholder, elements, source } = item;
    let encoded = source.encoded();
    let making = image_tensors.and_then(|format| source.making(format));
    let (width, height) = making.map_or((0, 0), |making| making.size);
    let Placeholder { offset, length, is_embed } = placeholder;
    let url = encoded.as_ref().and_then(|encoded| encoded.url.as_deref());
    Some(proto::MediaItem {
        modality: modality.name().to_owned(),
        mm_hash: Bytes::copy_from_slice(hash.as_bytes()),
        content: encoded
            .as_ref()
            .map(|encoded| Bytes::copy_from_slice(&encoded.content))
            .unwrap_or_default(),
        processor_kwargs: encoded
            .as_ref()
            .map(|encoded| encoded.processor_kwargs.to_string())
            .unwrap_or_default(),
        offset: u32::try_from(*offset).ok()?,
        length: u32::try_from(*length).ok()?,
        embeds: is_embed.as_deref().map(turns).unwrap_or_default(),
        elements: if encoded.is_none() { *elements } else { 0 },
        url: url.filter(|url| urls && url.len() <= MOST_URL_BYTES).unwrap_or_default().to_owned(),
        width,
        height,
    })
}

/// The item of a prompt of so many tokens. `None` if it can't be in it, or is malformed.
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
    } = item;
    // Before memory is taken for what a message claims.
    let length = Some(length as usize).filter(|length| (1..=prompt).contains(length))?;
    let is_embed = if embeds.is_empty() { None } else { Some(mask(&embeds, length)?) };
    let origin = if content.is_empty() {
        ItemOrigin::Tensors { elements }
    } else {
        let Ok(Value::Object(processor_kwargs)) = serde_json::from_str(&processor_kwargs) else {
            return None;
        };
        let content = ContentHash::new(content.as_ref().try_into().ok()?);
        let url = Some(url).filter(|url| !url.is_empty());
        // Nothing else of this machine is a frontend's to name.
        if !url.as_deref().is_none_or(is_on_the_web) {
            return None;
        }
        let size = Some((width, height)).filter(|&(width, height)| width > 0 && height > 0);
        ItemOrigin::File { content, processor_kwargs, url, size }
    };
    Some(PlannedItem {
        modality: Modality::from_name(&modality),
        hash: hash(&mm_hash)?,
        origin,
        placeholder: Placeholder { offset: offset as usize, length, is_embed },
    })
}

fn is_on_the_web(url: &str) -> bool {
    url.len() <= MOST_URL_BYTES
        && ["http://", "https://"].into_iter().any(|scheme| url.starts_with(scheme))
}

/// `None` unless these are the bytes of an identity.
pub(crate) fn hash(bytes: &[u8]) -> Option<MmHash> {
    Some(MmHash::new(bytes.try_into().ok()?))
}

/// How many don't embed, then how many do, and so on.
fn turns(mask: &[bool]) -> Vec<u32> {
    let mut turns = Vec::new();
    let mut embeds = false;
    let mut rest = mask;
    while !rest.is_empty() {
        let count = rest.iter().take_while(|embed| **embed == embeds).count();
        turns.push(count as u32);
        rest = &rest[count..];
        embeds = !embeds;
    }
    turns
}

/// The mask of these turns. `None` unless it has this length.
fn mask(turns: &[u32], length: usize) -> Option<Vec<bool>> {
    let total: u64 = turns.iter().map(|count| u64::from(*count)).sum();
    if total != length as u64 {
        return None;
    }
    let embeds = [false, true].into_iter().cycle();
    Some(
        turns
            .iter()
            .zip(embeds)
            .flat_map(|(count, embed)| std::iter::repeat_n(embed, *count as usize))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_follow_themselves_stand_once() {
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
            let told = prompt(runs);
            let (tokens, repeats) = collapsed(&told);
            assert_eq!(tokens.len(), once * TOKEN_BYTES, "{runs:?}");
            assert_eq!(expanded(&tokens, &repeats).unwrap(), told);
        }
    }

    #[test]
    fn repeats_of_nothing_out_of_order_or_too_many_are_refused() {
        let of = |at, more| proto::Repeats { at, more };
        let (one, two) = ([5, 0, 0, 0], [5, 0, 0, 0, 6, 0, 0, 0]);
        assert_eq!(expanded(&one, &[of(0, 2)]).unwrap(), [TokenId(5); 3]);
        assert!(expanded(&one, &[of(1, 2)]).is_none());
        assert!(expanded(&one, &[of(u32::MAX, 2)]).is_none());
        assert!(expanded(&two, &[of(1, 2), of(0, 2)]).is_none());
        assert!(expanded(&one, &[of(0, u32::MAX)]).is_none());
        assert!(expanded(&two[..7], &[]).is_none());
    }
}
