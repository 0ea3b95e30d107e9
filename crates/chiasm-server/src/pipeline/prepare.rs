//! From a parsed request to an expanded prompt, the identity of its media items and its block keys. Needs no pixel.

use std::sync::Arc;

use axum::http::{HeaderValue, StatusCode};
use chiasm_kv::{BlockKey, MediaSpan, PromptBlocks, block_keys};
use chiasm_media::{EncodedMedia, MediaHeader, MediaName, MediaPart};
use chiasm_prompt::{ChatMessage, Markers, RenderOptions, expand};
use chiasm_router::RouteItem;
use chiasm_types::{Dtype, MmHash, Placeholder, TokenId};
use chiasm_vision::{ImageKwargs, ImagePlan, ImagePrompt, ImageSize, PixelFormat, VisionModel};
use futures_util::future::try_join_all;

use super::plans::Plans;
use super::request::{Chat, GenerateRequest, MediaRef, Prompt, Sampling};
use crate::error::ApiError;
use crate::fleet::Shape;
use crate::frontend::Frontend;
use crate::model::ServedModel;

/// A prompt that is ready to be routed.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The expanded prompt: each media item stands as its placeholder.
    pub tokens: Vec<TokenId>,
    /// The media items in order of appearance.
    pub items: Vec<MediaItem>,
    /// Keys of the prompt's full blocks.
    pub keys: Vec<BlockKey>,
    /// As requested.
    pub sampling: Sampling,
    /// As requested.
    pub cache_salt: Option<String>,
    /// As requested.
    pub priority: i64,
    /// As requested.
    pub session: Option<u64>,
}

/// One media item of a prompt, its pixels still encoded.
#[derive(Clone, Debug)]
pub struct MediaItem {
    /// Its identity.
    pub hash: MmHash,
    /// Its size, grid and tensors.
    pub plan: Arc<ImagePlan>,
    /// Where it stands in the prompt.
    pub placeholder: Placeholder,
    /// Its encoded bytes.
    pub image: EncodedMedia,
    /// The request field it came from.
    pub field: String,
}

impl MediaItem {
    /// Its identity as engines see it: `mm_hash` and `identifier`.
    pub fn name(&self) -> String {
        self.hash.to_string()
    }

    /// What the router has to know of it.
    pub(super) fn to_route(&self, model: &ServedModel) -> RouteItem {
        let raw = model.vision.as_ref().is_some_and(VisionModel::engine_normalizes);
        let format = if raw { PixelFormat::RawU8 } else { PixelFormat::Normalized(Dtype::BF16) };
        RouteItem {
            hash: self.hash,
            end: self.placeholder.offset + self.placeholder.length,
            embeds: self.plan.tokens,
            bytes: self.plan.pixel_bytes(format) as u64,
        }
    }
}

/// Runs media, prompt, plan and keys for one request.
pub async fn prepare(frontend: &Frontend, request: GenerateRequest, shape: Shape) -> Result<Prepared, ApiError> {
    let GenerateRequest { prompt, sampling, cache_salt, priority, caller } = request;
    let mut prompt = prompt;
    let images = match &mut prompt {
        Prompt::Chat(chat) => {
            let owner =
                [caller.credentials.as_ref().map(HeaderValue::as_bytes), cache_salt.as_deref().map(str::as_bytes)];
            open_all(frontend, &mut chat.media, owner).await?
        }
        Prompt::Text(_) | Prompt::Tokens(_) => Vec::new(),
    };
    let (model, plans, session) = (frontend.model.clone(), frontend.plans.clone(), caller.session);
    // Templates, tokenizers and hashing take milliseconds for long prompts: not for the async threads.
    let small = is_small(&prompt, &model);
    frontend
        .cpu
        .run_or_here(small, move || {
            let (tokens, items) = match prompt {
                Prompt::Tokens(tokens) => (tokens, Vec::new()),
                Prompt::Text(text) => (model.tokenizer.encode(&text, true)?, Vec::new()),
                Prompt::Chat(chat) => lay_out(&model, &plans, &chat, images, shape)?,
            };
            check_tokens(&tokens, model.last_token())?;
            let media: Vec<MediaSpan> = items
                .iter()
                .map(|item| MediaSpan {
                    hash: item.hash,
                    offset: item.placeholder.offset,
                    length: item.placeholder.length,
                })
                .collect();
            let blocks = PromptBlocks { tokens: &tokens, media: &media, lora: None, salt: cache_salt.as_deref() };
            let keys = block_keys(&blocks, shape.block_size);
            Ok(Prepared { tokens, items, keys, sampling, cache_salt, priority, session })
        })
        .await?
}

/// Token ids of a prompt whose keys are computed in a hundred microseconds.
const SMALL_TOKENS: usize = 16 << 10;
/// Messages that a template renders in as much time.
const FEW_MESSAGES: usize = 8;

/// Whether a prompt is made in so little time that another thread would not be faster.
fn is_small(prompt: &Prompt, model: &ServedModel) -> bool {
    let small_text = model.tokenizer.quick_bytes();
    match prompt {
        Prompt::Text(text) => text.len() <= small_text,
        Prompt::Tokens(tokens) => tokens.len() <= SMALL_TOKENS,
        Prompt::Chat(chat) => {
            chat.messages.len() <= FEW_MESSAGES
                && chat.messages.iter().all(|message| message.tool_calls.is_none())
                && chat.messages.iter().map(ChatMessage::text_bytes).sum::<usize>() <= small_text
                && chat.media.len() <= FEW_MESSAGES
                && chat.template_kwargs.is_empty()
        }
    }
}

/// Bytes of every media item. URLs are taken out: they may be large.
async fn open_all(
    frontend: &Frontend,
    media: &mut [MediaRef],
    owner: [Option<&[u8]>; 2],
) -> Result<Vec<EncodedMedia>, ApiError> {
    if media.is_empty() {
        return Ok(Vec::new());
    }
    if frontend.model.vision.is_none() {
        return Err(ApiError::invalid(&media[0].field, format!("the model '{}' takes no images", frontend.model.name)));
    }
    let limit = frontend.limits.images_per_prompt;
    if media.len() > limit {
        return Err(ApiError {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            ..ApiError::invalid(
                &media[limit].field,
                format!("the prompt has {} images, at most {limit} are allowed (--limit-mm-per-prompt)", media.len()),
            )
        });
    }
    let open = async |item: &mut MediaRef| {
        let at_field = |error| ApiError::from(error).at(&item.field);
        let name = item.uuid.as_deref().map(|uuid| MediaName::new(owner, uuid)).transpose().map_err(at_field)?;
        frontend.door.open(MediaPart { url: item.url.take(), name }).await.map_err(at_field)
    };
    try_join_all(media.iter_mut().map(open)).await
}

/// Renders and tokenizes a conversation and puts a placeholder where each image goes.
fn lay_out(
    model: &ServedModel,
    plans: &Plans,
    chat: &Chat,
    images: Vec<EncodedMedia>,
    shape: Shape,
) -> Result<(Vec<TokenId>, Vec<MediaItem>), ApiError> {
    let template = model.template.as_ref().ok_or_else(|| {
        ApiError::invalid(
            "messages",
            format!("the model '{}' has no chat template; use /v1/completions or --chat-template", model.name),
        )
    })?;
    let options = RenderOptions {
        add_generation_prompt: chat.add_generation_prompt,
        continue_final_message: chat.continue_final_message,
        kwargs: chat.template_kwargs.clone(),
    };
    let image_prompt = model.vision.as_ref().map(|vision| vision.prompt());
    let mut text = template.render(&chat.messages, image_prompt.map_or("", |prompt| prompt.text), &options)?;
    if let Some((from, to)) = image_prompt.and_then(|prompt| prompt.rewrite) {
        text = text.replace(from, to);
    }
    let tokens = model.tokenizer.encode(&text, false)?;
    let Some(vision) = &model.vision else {
        return Ok((tokens, Vec::new()));
    };

    let kwargs =
        vision.parse_kwargs(&chat.processor_kwargs).map_err(|error| ApiError::from(error).at("mm_processor_kwargs"))?;
    let fingerprint = vision.fingerprint(&kwargs);
    let mut items = Vec::with_capacity(images.len());
    let mut image_tokens = 0;
    for (image, source) in images.into_iter().zip(&chat.media) {
        let MediaHeader::Image(header) = image.header else {
            return Err(ApiError::invalid(&source.field, format!("the model takes no {}", image.modality())));
        };
        let size = ImageSize { width: header.width, height: header.height };
        let hash = chiasm_media::mm_hash(&image.content, &image.modality(), &fingerprint);
        let plan = || vision.plan(size, &kwargs).map_err(|error| ApiError::from(error).at(&source.field));
        let plan = plans.get_or_make(hash, plan)?;
        // Settings of a request can ask for images of any size: checked before anything of that size is made.
        image_tokens += plan.tokens;
        if image_tokens > shape.max_model_len {
            return Err(too_long(image_tokens, shape.max_model_len).at(&source.field));
        }
        check_fits_encoder_cache(vision, size, &plan, shape).map_err(|error| error.at(&source.field))?;
        items.push((hash, plan, image, source.field.clone()));
    }
    let runs: Vec<_> = items.iter().map(|(_, plan, ..)| plan.placeholder.clone()).collect();
    let ImagePrompt { marker, joins, .. } = vision.prompt();
    let expanded = expand(&tokens, Markers { marker, joins }, &runs)?;
    let items = items
        .into_iter()
        .zip(expanded.placeholders)
        .map(|((hash, plan, image, field), placeholder)| MediaItem { hash, plan, placeholder, image, field })
        .collect();
    Ok((expanded.tokens, items))
}

/// An engine waits for ever with an image that its encoder cache can't hold. The cache holds what the model's own
/// settings can ask for, and at least the tokens of one step (`compute_mm_encoder_budget` in vLLM); a request's
/// settings may ask for more.
fn check_fits_encoder_cache(
    vision: &VisionModel,
    size: ImageSize,
    plan: &ImagePlan,
    shape: Shape,
) -> Result<(), ApiError> {
    if plan.tokens <= shape.max_batched_tokens {
        return Ok(());
    }
    let usual = vision.plan(size, &ImageKwargs::default())?;
    if plan.tokens <= usual.tokens {
        return Ok(());
    }
    Err(ApiError::invalid(
        "mm_processor_kwargs",
        format!(
            "the image would take {} tokens, more than engines can encode at once ({})",
            plan.tokens, shape.max_batched_tokens
        ),
    ))
}

/// The prompt does not fit the model's context.
pub(super) fn too_long(tokens: usize, max_model_len: usize) -> ApiError {
    ApiError {
        status: StatusCode::BAD_REQUEST,
        message: format!(
            "the prompt has {tokens} tokens; this model's context of {max_model_len} leaves no room for an answer"
        ),
        param: None,
        code: "context_length_exceeded",
    }
}

/// An engine fails on a token it does not know, and then for everybody.
fn check_tokens(tokens: &[TokenId], last: TokenId) -> Result<(), ApiError> {
    if tokens.is_empty() {
        return Err(ApiError::invalid("prompt", "the prompt is empty"));
    }
    match tokens.iter().find(|&&token| token > last) {
        Some(token) => Err(ApiError::invalid("prompt", format!("token id {token} is outside the vocabulary"))),
        None => Ok(()),
    }
}
