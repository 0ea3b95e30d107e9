//! Preparing a request: expanded prompts, the identity of its media items and its block keys,
//! without a pixel.

mod helped;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{
    Constraint, Input, JobItem, PlaceholderForm, ReasoningHints, RequestId, Structured, Supports,
    TraceContext,
};
use chiasm_fleet::adapters::ServedAdapter;
use chiasm_fleet::{PresentClass, PresentClasses, keys_for, spans};
use chiasm_kv::{BlockKey, MediaSpan, PromptBlocks};
use chiasm_media::EncodedMedia;
use chiasm_prompt::{Item, Marker, MarkerText, Markers, PromptError, RenderOptions, expand};
use chiasm_request::StageTimes;
use chiasm_request::{Chat, GenerateRequest, MediaRef, Prompt, Sampling, ToolChoice, ToolUse};
use chiasm_router::RouteItem;
use chiasm_types::{Modality, Placeholder, PlanClassId, TokenId};
use chiasm_vision::ImagePrompt;
use tokio::time::Instant;
use tracing::Instrument;

use super::caller::Caller;
use super::deadlines::{Deadlines, within};
use super::error::{Cause, RequestError};
use super::image::Images;
use super::item::ItemPlan;
use super::observer::{ExplainedPlan, PromptEntry};
use super::opening::open_all;
use super::prompt_price::{is_small, price_of};
use super::reading::{Reading, calls_or};
use super::sampling;
use super::tried::Attempts;
use crate::Pipeline;
use crate::cpu::CpuBudget;
use crate::model::ServedModel;

/// A request that is ready to be routed.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The request's identity.
    pub(crate) id: RequestId,
    /// The trace that it belongs to.
    pub(crate) trace: Option<TraceContext>,
    /// What it is for workers of each plan class in the fleet; at least one.
    pub(crate) plans: Vec<Planned>,
    /// How tokens are chosen, as the client asked.
    pub(crate) sampling: Sampling,
    /// What of it not every worker can be asked for.
    pub(crate) needs: Supports,
    /// What a backend is told of its reasoning.
    pub(crate) reasoning: ReasoningHints,
    /// How its answers are read, if they are more than text.
    pub(crate) reading: Option<Arc<Reading>>,
    /// The LoRA adapter that computes it, if one is to.
    pub(crate) adapter: Option<Arc<ServedAdapter>>,
    /// What keeps prompts of different owners apart, if anything.
    pub(crate) cache_salt: Option<String>,
    /// Lower is handled earlier.
    pub(crate) priority: i64,
    /// Requests with the same number go to the same worker if they can.
    pub(crate) session: Option<u64>,
    /// When it arrived.
    pub(crate) arrived: Instant,
    /// How long it may take.
    pub(crate) deadlines: Deadlines,
    /// What it has been through before it was prepared.
    pub(crate) tried: Attempts,
    /// What preparing it took.
    pub(crate) took: StageTimes,
    /// Its entry on the live page.
    pub(crate) entry: PromptEntry,
}

/// What a request is for workers of one plan class.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    /// The class.
    pub(crate) class: PlanClassId,
    /// The expanded prompt: each media item stands as its placeholder.
    pub(crate) tokens: Arc<Vec<TokenId>>,
    /// The prompt with one marker for each media item, for workers that expand it themselves.
    pub(crate) marked: Option<Arc<Vec<TokenId>>>,
    /// Keys of the prompt's full blocks.
    pub(crate) keys: Vec<BlockKey>,
    /// Embeddings that a worker must be able to encode at once; 0 if any can.
    pub(crate) encoder_tokens: usize,
    /// The media items in order of appearance, as the router sees them.
    pub(crate) route_items: Vec<RouteItem>,
    /// The media items in order of appearance, as a backend sees them.
    pub(crate) job_items: Arc<[JobItem]>,
}

impl Prepared {
    /// How tokens are chosen.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// The tokens of the prompt for workers of a class. `None` if no worker of the class was there
    /// when the request was prepared.
    pub fn tokens(&self, class: PlanClassId) -> Option<&Arc<Vec<TokenId>>> {
        self.plan(class).map(|plan| &plan.tokens)
    }

    /// The tokens of a prompt without media, which are the same for all classes.
    pub fn text_tokens(&self) -> Arc<Vec<TokenId>> {
        self.plans.first().map(|plan| plan.tokens.clone()).unwrap_or_default()
    }

    /// The number of tokens of the prompt, for the workers for which it is the longest.
    pub fn prompt_tokens(&self) -> usize {
        self.plans.iter().map(|plan| plan.tokens.len()).max().unwrap_or(0)
    }

    /// Whether its answers are parsed: they may have reasoning or calls.
    pub fn parses_answers(&self) -> bool {
        self.reading.is_some()
    }

    /// Whether its answers may have reasoning.
    pub fn reads_reasoning(&self) -> bool {
        self.reading.as_ref().is_some_and(|reading| reading.reads_reasoning())
    }

    /// Returns a number for everything that engines are given to compute: tokens, media by
    /// identity, and the adapter.
    pub(super) fn fingerprint(&self, state: &RandomState) -> u64 {
        let mut hasher = state.build_hasher();
        if let Some(adapter) = &self.adapter {
            hasher.write(adapter.engine().name.as_bytes());
        }
        for plan in &self.plans {
            plan.tokens.iter().for_each(|token| hasher.write_u32(token.0));
            plan.route_items.iter().for_each(|item| hasher.write(item.hash.as_bytes()));
        }
        hasher.finish()
    }

    /// The plan for workers of a class. `None` if no worker of the class was there when the request
    /// was prepared.
    pub(crate) fn plan(&self, class: PlanClassId) -> Option<&Planned> {
        self.plans.iter().find(|plan| plan.class == class)
    }
}

impl Planned {
    /// Returns the plan as an explanation of the route shows it.
    pub(crate) fn explained(&self) -> ExplainedPlan<'_> {
        ExplainedPlan {
            class: self.class,
            prompt_tokens: self.tokens.len(),
            items: &self.job_items,
        }
    }
}

/// Runs media, prompt, plan and keys for one request.
///
/// # Errors
/// [`RequestError`] says what is wrong with which field, that no engine is ready, or that it took
/// too long.
pub async fn prepare(
    pipeline: &Pipeline,
    request: GenerateRequest,
    adapter: Option<Arc<ServedAdapter>>,
    caller: &Caller,
    classes: PresentClasses,
) -> Result<Prepared, RequestError> {
    let deadlines = Deadlines::of(caller.arrived, &pipeline.limits);
    within(deadlines.first_token, prepared(pipeline, request, adapter, caller, classes, deadlines))
        .await?
}

async fn prepared(
    pipeline: &Pipeline,
    request: GenerateRequest,
    adapter: Option<Arc<ServedAdapter>>,
    caller: &Caller,
    classes: PresentClasses,
    deadlines: Deadlines,
) -> Result<Prepared, RequestError> {
    let GenerateRequest {
        mut prompt,
        mut sampling,
        cache_salt,
        priority,
        tools,
        without_reasoning,
    } = request;
    let begun = Instant::now();
    let may_think = pipeline.model.answers.may_think();
    sampling.thinking_budget =
        sampling.thinking_budget.filter(|budget| may_think || !budget.only_if_thinking);
    let mut reasoning = ReasoningHints::default();
    let reading = match prompt {
        Prompt::Chat(ref mut chat) => {
            let is_uncalled = tools.as_ref().is_some_and(|tools| tools.choice == ToolChoice::None);
            if is_uncalled && pipeline.model.chats.excludes_uncalled_tools {
                chat.tools = None;
            }
            let (reading, constraint) =
                Reading::plan(&pipeline.model, chat, tools.as_ref(), without_reasoning)?;
            sampling.structured =
                with_calls(&pipeline.model, tools.as_ref(), sampling.structured, constraint);
            // As in vLLM, which has its frontend's reasoning parser and that of an engine see the
            // same (`ChatCompletionRequest.resolve_reasoning_ended`); only constraints are held
            // back by reasoning.
            if sampling.structured.is_some() && pipeline.model.answers.engine_parser().is_some() {
                let variables = chat.thinking_variables(&pipeline.model.chats);
                reasoning = ReasoningHints { is_over: without_reasoning, variables };
            }
            reading
        }
        Prompt::Text(_) | Prompt::Tokens(_) => None,
    };
    let media = match &mut prompt {
        Prompt::Chat(chat) => {
            let owner = [caller.credentials.as_deref(), cache_salt.as_deref().map(str::as_bytes)];
            open_all(pipeline, &mut chat.media, owner)
                .instrument(tracing::debug_span!("fetch"))
                .await?
        }
        Prompt::Text(_) | Prompt::Tokens(_) => Vec::new(),
    };
    let fetch = begun.elapsed();
    let has_settings = matches!(&prompt, Prompt::Chat(chat) if !chat.media.is_empty() && !chat.media_kwargs.processor.is_empty());
    let needs = Supports {
        processor_kwargs: has_settings,
        media: !media.is_empty(),
        cache_salt: cache_salt.is_some(),
        ..sampling::needs(&sampling)
    };
    let apart = Apart { adapter: adapter.clone(), salt: cache_salt.clone() };
    let preparation = Preparation { pipeline, cpu: &caller.cpu, classes, apart };
    let field = prompt.field();
    let span = tracing::debug_span!("plan", items = media.len());
    let plans = match prompt {
        Prompt::Chat(chat) => match pipeline.helped_with(&media).await? {
            None => preparation.plan(Prompt::Chat(chat), media).instrument(span).await,
            Some(helpers) => {
                preparation.plan_with_help(helpers, chat, media).instrument(span).await
            }
        },
        prompt => preparation.plan(prompt, media).instrument(span).await,
    };
    let plans = plans.map_err(|error| error.at(field))?;
    let Caller { id, trace, session, arrived, tried, entries, .. } = caller.clone();
    let before = begun.saturating_duration_since(arrived);
    let took = StageTimes { before, fetch, plan: begun.elapsed() - fetch };
    Ok(Prepared {
        id,
        trace,
        plans,
        sampling,
        needs,
        reasoning,
        reading,
        adapter,
        cache_salt,
        priority,
        session,
        arrived,
        deadlines,
        tried,
        took,
        entry: entries.add_prompt(),
    })
}

/// Returns the one constraint of a request. A model that has to call is held to that alone, as in
/// vLLM; one that may call is held to calls or to what the request asks for.
fn with_calls(
    model: &ServedModel,
    tools: Option<&ToolUse>,
    own: Option<Structured>,
    calls: Option<Constraint>,
) -> Option<Structured> {
    let Some(calls) = calls else { return own };
    let constraint = match (&own, tools) {
        (Some(own), Some(tools)) if tools.choice == ToolChoice::Auto => {
            calls_or(model, tools, &own.constraint)
        }
        _ => Some(calls),
    };
    constraint.map(|constraint| Structured { constraint, field: "tools" }).or(own)
}

/// What all ways of planning a request share.
#[derive(Clone)]
pub(super) struct Preparation<'a> {
    pub(super) pipeline: &'a Pipeline,
    pub(super) cpu: &'a CpuBudget,
    pub(super) classes: PresentClasses,
    pub(super) apart: Apart,
}

/// What keeps the blocks of equal prompts apart.
#[derive(Clone, Debug)]
pub(super) struct Apart {
    pub(super) adapter: Option<Arc<ServedAdapter>>,
    pub(super) salt: Option<String>,
}

impl Apart {
    /// Token ids of a text. Whose blocks nobody else may find out about, neither are their texts.
    fn encode(
        &self,
        model: &ServedModel,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, PromptError> {
        match self.salt {
            Some(_) => model.tokenizer.encode_apart(text, add_special_tokens),
            None => model.tokenizer.encode(text, add_special_tokens),
        }
    }
}

impl Preparation<'_> {
    /// Does work that takes milliseconds for long prompts: not for the async threads.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        small: bool,
        cost: Duration,
        work: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
    ) -> Result<T, RequestError> {
        let span = tracing::Span::current();
        self.pipeline.cpu.run_or_here(small, self.cpu, cost, move || span.in_scope(work)).await?
    }

    /// Plans what needs nobody's help.
    async fn plan(
        &self,
        prompt: Prompt,
        media: Vec<EncodedMedia>,
    ) -> Result<Vec<Planned>, RequestError> {
        let (model, images) = (self.pipeline.model.clone(), self.pipeline.images.clone());
        let (classes, apart, cpu) = (self.classes.clone(), self.apart.clone(), self.cpu.clone());
        let (small, cost) = (is_small(&prompt, &model), price_of(&prompt, &model, self.cpu));
        self.run(small, cost, move || match prompt {
            Prompt::Tokens(tokens) => plan_text(tokens, &classes, &apart, &model),
            Prompt::Text(text) => {
                plan_text(apart.encode(&model, &text, true)?, &classes, &apart, &model)
            }
            Prompt::Chat(chat) => plan_chat(&model, &images, chat, &media, &classes, &apart, &cpu),
        })
        .await
    }
}

/// A prompt without media items, for each class.
fn plan_text(
    tokens: Vec<TokenId>,
    classes: &[PresentClass],
    apart: &Apart,
    model: &ServedModel,
) -> Result<Vec<Planned>, RequestError> {
    check_tokens(&tokens, model.last_token())?;
    let tokens = Arc::new(tokens);
    let plans =
        classes.iter().map(|class| planned(class, tokens.clone(), Vec::new(), apart)).collect();
    that_fit(plans, classes)
}

/// Renders and tokenizes a conversation. Its messages may be large, and are dropped as soon as they
/// are not needed.
pub(super) fn render(
    model: &ServedModel,
    chat: Chat,
    texts: &[MarkerText<'_>],
    apart: &Apart,
) -> Result<Vec<TokenId>, RequestError> {
    Ok(apart.encode(model, &render_text(model, chat, texts)?, false)?)
}

fn render_text(
    model: &ServedModel,
    mut chat: Chat,
    texts: &[MarkerText<'_>],
) -> Result<String, RequestError> {
    let template = model.template.as_ref().ok_or_else(|| {
        RequestError::invalid(
            "messages",
            format!(
                "the model '{}' has no chat template; use /v1/completions or --chat-template",
                model.name
            ),
        )
    })?;
    let options = RenderOptions {
        add_generation_prompt: chat.add_generation_prompt,
        continue_final_message: chat.continue_final_message,
        kwargs: chat.take_template_variables(&model.chats),
        tools: chat.tools,
    };
    Ok(template.render(&chat.messages, texts, &options)?)
}

/// Renders and tokenizes a conversation, and for each class puts a placeholder where each media
/// item goes.
fn plan_chat(
    model: &ServedModel,
    images: &Arc<Images>,
    mut chat: Chat,
    media: &[EncodedMedia],
    classes: &[PresentClass],
    apart: &Apart,
    cpu: &CpuBudget,
) -> Result<Vec<Planned>, RequestError> {
    if let Some((name, _)) = chat
        .media_kwargs
        .io
        .iter()
        .find(|(_, kwargs)| kwargs.as_object().is_none_or(|kwargs| !kwargs.is_empty()))
    {
        return Err(RequestError::invalid(
            format!("media_io_kwargs.{name}"),
            "no settings are taken for these items",
        ));
    }
    let image_prompt = model.vision.as_ref().map(|vision| vision.prompt());
    let of_images = image_prompt.as_ref().map(|prompt| [prompt.text]);
    let texts = of_images.as_ref().map(|texts| MarkerText { modality: &Modality::Image, texts });
    let (sources, kwargs) =
        (std::mem::take(&mut chat.media), std::mem::take(&mut chat.media_kwargs).processor);
    let rewrite = image_prompt.and_then(|prompt| prompt.rewrite);
    let text = render_text(model, chat, texts.as_slice())?;
    let rewritten = rewrite.map(|(from, to)| text.replace(from, to));
    let tokens = apart.encode(model, rewritten.as_deref().unwrap_or(&text), false)?;
    let Some(vision) = &model.vision else { return plan_text(tokens, classes, apart, model) };
    let expand_themselves =
        |class: &PresentClass| class.class.placeholders == PlaceholderForm::Marker;
    let marked = match classes.iter().any(expand_themselves) {
        // What is rewritten is for our own expansion alone.
        true if rewrite.is_some() => Arc::new(apart.encode(model, &text, false)?),
        true => Arc::new(tokens.clone()),
        false => Arc::default(),
    };
    drop((text, rewritten));
    let ImagePrompt { marker, joins, .. } = vision.prompt();
    let of_image = Marker { modality: &Modality::Image, tokens: marker };
    let for_class = |class: &PresentClass| -> Result<Planned, RequestError> {
        let settings = images.settings(&kwargs, class)?;
        let mut item_tokens = 0;
        let plan = |(image, source): (&EncodedMedia, &MediaRef)| {
            let plan = images.plan(image, &settings, class, &source.field, cpu)?;
            // Settings of a request can ask for images of any size: checked before anything of that
            // size is made.
            item_tokens += plan.embeds;
            if item_tokens > class.max_model_len {
                let max_model_len = class.max_model_len;
                return Err(RequestError::from(Cause::ContextFull {
                    tokens: item_tokens,
                    max_model_len,
                })
                .at(&source.field));
            }
            Ok(plan)
        };
        let items: Vec<ItemPlan> =
            media.iter().zip(&sources).map(plan).collect::<Result<_, _>>()?;
        let placed: Vec<_> =
            items.iter().map(|item| Item { modality: &item.modality, runs: &item.runs }).collect();
        let expanded = expand(&tokens, Markers { of: &[of_image], joins }, &placed)?;
        check_tokens(&expanded.tokens, model.last_token())?;
        let plan = planned(
            class,
            Arc::new(expanded.tokens),
            in_prompt_order(items, expanded.placeholders),
            apart,
        );
        let is_marked = expand_themselves(class) && !plan.job_items.is_empty();
        Ok(Planned { marked: is_marked.then(|| marked.clone()), ..plan })
    };
    that_fit(classes.iter().map(for_class).collect::<Result<_, _>>()?, classes)
}

/// The plans for classes with a worker whose context has room for an answer.
pub(super) fn that_fit(
    mut plans: Vec<Planned>,
    classes: &[PresentClass],
) -> Result<Vec<Planned>, RequestError> {
    let room = |plan: &Planned| {
        classes.iter().find(|class| class.id == plan.class).map_or(0, |class| class.max_model_len)
    };
    let largest = plans.iter().map(|plan| (room(plan), plan.tokens.len())).max();
    plans.retain(|plan| plan.tokens.len() < room(plan));
    match (plans.is_empty(), largest) {
        (true, Some((max_model_len, tokens))) => {
            Err(Cause::ContextFull { tokens, max_model_len }.into())
        }
        _ => Ok(plans),
    }
}

/// Items with their places, in the order of the prompt.
pub(super) fn in_prompt_order(
    items: Vec<ItemPlan>,
    placeholders: Vec<Placeholder>,
) -> Vec<(ItemPlan, Placeholder)> {
    let mut placed: Vec<_> = items.into_iter().zip(placeholders).collect();
    placed.sort_by_key(|(_, at)| at.offset);
    placed
}

/// Adds the block keys, and what router and backend have to know of the items.
pub(super) fn planned(
    class: &PresentClass,
    tokens: Arc<Vec<TokenId>>,
    items: Vec<(ItemPlan, Placeholder)>,
    apart: &Apart,
) -> Planned {
    let media: Vec<MediaSpan> =
        items.iter().flat_map(|(item, at)| spans(&class.class, item.hash, at)).collect();
    let lora = apart.adapter.as_ref().map(|adapter| adapter.engine().name.as_str());
    let blocks = PromptBlocks { tokens: &tokens, media: &media, lora, salt: apart.salt.as_deref() };
    let keys = keys_for(&class.class, &blocks);
    Planned {
        class: class.id,
        encoder_tokens: items.iter().map(|(item, _)| item.encoder_tokens).max().unwrap_or(0),
        route_items: items.iter().map(|(item, at)| item.to_route(at)).collect(),
        job_items: items.into_iter().map(|(item, at)| item.into_job(at)).collect(),
        tokens,
        marked: None,
        keys,
    }
}

impl Planned {
    /// What a worker of the class is given.
    pub(super) fn input(&self) -> Input {
        match &self.marked {
            Some(marked) => Input::Marked { tokens: marked.clone(), expanded: self.tokens.clone() },
            None => Input::Tokens(self.tokens.clone()),
        }
    }
}

/// An engine fails on a token it does not know, and then for everybody.
pub(super) fn check_tokens(tokens: &[TokenId], last: TokenId) -> Result<(), RequestError> {
    match tokens.iter().copied().max() {
        None => Err(Cause::Invalid("the prompt is empty".to_owned()).into()),
        Some(token) if token > last => {
            Err(Cause::Invalid(format!("token id {token} is outside the vocabulary")).into())
        }
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
