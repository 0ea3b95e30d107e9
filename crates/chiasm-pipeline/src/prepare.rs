//! Preparation of a request: expanded prompts, media identities and block keys, without decoding
//! pixels.

mod native_items;
mod plan_again;
mod processor_plans;

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
use chiasm_request::{Chat, ClientSampling, GenerateRequest, Prompt, ToolChoice, ToolUse};
use chiasm_router::RouteItem;
use chiasm_types::{Modality, Placeholder, PlanClassId, TokenId};
use chiasm_vision::ImagePrompt;
use tokio::time::Instant;
use tracing::Instrument;

use super::deadlines::{Deadlines, within};
use super::error::{Cause, RequestError};
use super::item::ItemPlan;
use super::last_route::LastRoute;
use super::observer::{ExplainedPlan, PromptEntry};
use super::opening::open_all;
use super::output_parsing::{OutputParsing, combine_with_calls};
use super::past_attempts::Attempts;
use super::prompt_price::{is_small, price_of};
use super::request_context::RequestContext;
use super::sampling;
use super::video::PlannedVideos;
use crate::Pipeline;
use crate::model::ServedModel;
use chiasm_cpu::CpuBudget;
use native_items::NativeItems;
use plan_again::{PlanInputs, Replanning};

/// A request that is ready to be routed.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The request's identity.
    pub(crate) id: RequestId,
    /// The trace that the request belongs to.
    pub(crate) trace: Option<TraceContext>,
    /// The plans for the plan classes in the fleet; never empty.
    pub(crate) plans: Vec<ClassPlan>,
    /// The inputs for planning the request again; `None` if no plan can be stale.
    replanning: Option<Box<Replanning>>,
    /// The requested sampling parameters.
    pub(crate) sampling: ClientSampling,
    /// The optional parts of the request, which not every worker supports.
    pub(crate) needs: Supports,
    /// The hints about reasoning for the backend.
    pub(crate) reasoning: ReasoningHints,
    /// The parsing of the answers; `None` if they are plain text.
    pub(crate) output_parsing: Option<Arc<OutputParsing>>,
    /// The requested LoRA adapter.
    pub(crate) adapter: Option<Arc<ServedAdapter>>,
    /// The salt that separates the KV caches of different users.
    pub(crate) cache_salt: Option<String>,
    /// The priority. Lower values are handled earlier.
    pub(crate) priority: i64,
    /// A session number. Requests with the same number go to the same worker if possible.
    pub(crate) session: Option<u64>,
    /// The time of the request's arrival.
    pub(crate) arrived: Instant,
    /// The request's deadlines.
    pub(crate) deadlines: Deadlines,
    /// The attempts before the preparation.
    pub(crate) attempts: Attempts,
    /// The times of the preparation stages.
    pub(crate) stage_times: StageTimes,
    /// The prompt's entry on the live page.
    pub(crate) entry: PromptEntry,
    /// The request's latest route.
    pub(crate) last_route: LastRoute,
}

/// The plan of a request for workers of one plan class.
#[derive(Clone, Debug)]
pub(crate) struct ClassPlan {
    /// The class.
    pub(crate) class: PlanClassId,
    /// The expanded prompt, with a placeholder for each media item.
    pub(crate) tokens: Arc<Vec<TokenId>>,
    /// The prompt with a marker for each media item, for workers that expand prompts themselves.
    pub(crate) marked: Option<Arc<Vec<TokenId>>>,
    /// The keys of the prompt's full blocks.
    pub(crate) keys: Vec<BlockKey>,
    /// The number of embeddings that a worker must be able to encode at once; 0 if every worker
    /// can.
    pub(crate) encoder_tokens: usize,
    /// The media items in order of appearance, as the router sees them.
    pub(crate) route_items: Vec<RouteItem>,
    /// The media items in order of appearance, as a backend sees them.
    pub(crate) job_items: Arc<[JobItem]>,
}

impl Prepared {
    /// Returns the requested sampling parameters.
    pub fn sampling(&self) -> &ClientSampling {
        &self.sampling
    }

    /// Returns the tokens of the prompt for workers of a class. Returns `None` if the class had no
    /// worker when the request was prepared.
    pub fn tokens(&self, class: PlanClassId) -> Option<&Arc<Vec<TokenId>>> {
        self.plan(class).map(|plan| &plan.tokens)
    }

    /// Returns the tokens of a prompt without media, which are the same for all classes.
    pub fn text_tokens(&self) -> Arc<Vec<TokenId>> {
        self.plans.first().map(|plan| plan.tokens.clone()).unwrap_or_default()
    }

    /// Returns the number of prompt tokens, for the class with the longest prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.plans.iter().map(|plan| plan.tokens.len()).max().unwrap_or(0)
    }

    /// Returns `true` if the answers are parsed because they may have reasoning or calls.
    pub fn parses_answers(&self) -> bool {
        self.output_parsing.is_some()
    }

    /// Returns `true` if the answers may have reasoning.
    pub fn reads_reasoning(&self) -> bool {
        self.output_parsing.as_ref().is_some_and(|parsing| parsing.reads_reasoning())
    }

    /// Hashes what an engine computes: tokens, media identities and the adapter.
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

    /// Returns the plan for workers of a class. Returns `None` if the class had no worker when the
    /// request was prepared.
    pub(crate) fn plan(&self, class: PlanClassId) -> Option<&ClassPlan> {
        self.plans.iter().find(|plan| plan.class == class)
    }
}

impl ClassPlan {
    /// Returns the plan for an explanation of the route.
    pub(crate) fn explained(&self) -> ExplainedPlan<'_> {
        ExplainedPlan {
            class: self.class,
            prompt_tokens: self.tokens.len(),
            items: &self.job_items,
        }
    }
}

/// Prepares a request: loads its media, renders and expands its prompt, and computes its block
/// keys.
///
/// # Errors
/// Returns an error if a field is invalid, if no engine is ready, or if the deadline passes.
pub async fn prepare(
    pipeline: &Pipeline,
    request: GenerateRequest,
    adapter: Option<Arc<ServedAdapter>>,
    context: &RequestContext,
    classes: PresentClasses,
) -> Result<Prepared, RequestError> {
    let deadlines = Deadlines::new(context.arrived, &pipeline.limits);
    let prepared = prepare_now(pipeline, request, adapter, context, classes, deadlines);
    within(deadlines.first_token, prepared).await?
}

async fn prepare_now(
    pipeline: &Pipeline,
    request: GenerateRequest,
    adapter: Option<Arc<ServedAdapter>>,
    context: &RequestContext,
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
    let started = Instant::now();
    let may_think = pipeline.model.answers.may_think();
    sampling.thinking_budget =
        sampling.thinking_budget.filter(|budget| may_think || !budget.only_if_thinking);
    let mut reasoning = ReasoningHints::default();
    let output_parsing = match prompt {
        Prompt::Chat(ref mut chat) => {
            let forbids_calls =
                tools.as_ref().is_some_and(|tools| tools.choice == ToolChoice::None);
            if forbids_calls && pipeline.model.chats.excludes_uncalled_tools {
                chat.tools = None;
            }
            let (output_parsing, constraint) =
                OutputParsing::plan(&pipeline.model, chat, tools.as_ref(), without_reasoning)?;
            sampling.structured = combine_constraints(
                &pipeline.model,
                tools.as_ref(),
                sampling.structured,
                constraint,
            );
            // As in vLLM, where the reasoning parsers of frontend and engine agree
            // (`ChatCompletionRequest.resolve_reasoning_ended`). Only constraints wait for the end
            // of reasoning.
            if sampling.structured.is_some() && pipeline.model.answers.engine_parser().is_some() {
                let variables = chat.thinking_variables(&pipeline.model.chats);
                reasoning = ReasoningHints { is_over: without_reasoning, variables };
            }
            output_parsing
        }
        Prompt::Text(_) | Prompt::Tokens(_) => None,
    };
    let media = match &mut prompt {
        Prompt::Chat(chat) => {
            let owner = [context.credentials.as_deref(), cache_salt.as_deref().map(str::as_bytes)];
            open_all(pipeline, &mut chat.media, owner)
                .instrument(tracing::debug_span!("fetch"))
                .await?
        }
        Prompt::Text(_) | Prompt::Tokens(_) => Vec::new(),
    };
    let fetch = started.elapsed();
    let has_settings = match &prompt {
        Prompt::Chat(chat) => !chat.media.is_empty() && !chat.media_kwargs.processor.is_empty(),
        Prompt::Text(_) | Prompt::Tokens(_) => false,
    };
    let needs = Supports {
        processor_kwargs: has_settings,
        media: !media.is_empty(),
        cache_salt: cache_salt.is_some(),
        ..sampling::needs(&sampling)
    };
    let namespace = CacheNamespace { adapter: adapter.clone(), salt: cache_salt.clone() };
    let field = prompt.field();
    let span = tracing::debug_span!("plan", items = media.len());
    let cpu = context.cpu.clone();
    let inputs = PlanInputs { prompt, media, classes, namespace, cpu, predicts_recordings: true };
    let plans = async {
        let videos = inputs.plan_videos(pipeline).await?;
        let replanning = Replanning::new(pipeline, &inputs, &videos);
        Ok((inputs.plan(pipeline, videos).await?, replanning))
    };
    let plans: Result<_, RequestError> = plans.instrument(span).await;
    let (plans, replanning) = plans.map_err(|error| error.at(field))?;
    let RequestContext { id, trace, session, arrived, attempts, entries, last_route, .. } =
        context.clone();
    let parse = started.saturating_duration_since(arrived);
    let stage_times = StageTimes { parse, fetch, plan: started.elapsed() - fetch };
    Ok(Prepared {
        id,
        trace,
        plans,
        replanning,
        sampling,
        needs,
        reasoning,
        output_parsing,
        adapter,
        cache_salt,
        priority,
        session,
        arrived,
        deadlines,
        attempts,
        stage_times,
        entry: entries.add_prompt(),
        last_route,
    })
}

/// Combines the request's own constraint with the one for calls.
///
/// As in vLLM, a model that must call is constrained to calls alone. A model that may call is
/// constrained to calls or to the request's own constraint.
fn combine_constraints(
    model: &ServedModel,
    tools: Option<&ToolUse>,
    own: Option<Structured>,
    calls: Option<Constraint>,
) -> Option<Structured> {
    let Some(calls) = calls else { return own };
    let constraint = match (&own, tools) {
        (Some(own), Some(tools)) if tools.choice == ToolChoice::Auto => {
            combine_with_calls(model, tools, &own.constraint)
        }
        _ => Some(calls),
    };
    constraint.map(|constraint| Structured { constraint, field: "tools" }).or(own)
}

/// The inputs of planning a request.
#[derive(Clone)]
pub(super) struct Preparation<'a> {
    pub(super) pipeline: &'a Pipeline,
    pub(super) cpu: &'a CpuBudget,
    pub(super) classes: PresentClasses,
    pub(super) namespace: CacheNamespace,
    /// The request's planned videos.
    pub(super) videos: PlannedVideos,
    /// Lets recordings be planned from their headers.
    pub(super) predicts_recordings: bool,
}

/// The parts of a request that separate the KV blocks of equal prompts.
#[derive(Clone, Debug)]
pub(super) struct CacheNamespace {
    pub(super) adapter: Option<Arc<ServedAdapter>>,
    pub(super) salt: Option<String>,
}

impl CacheNamespace {
    /// Tokenizes a text. A salted request bypasses the token cache, so that other users can't find
    /// out about its texts.
    fn encode(
        &self,
        model: &ServedModel,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, PromptError> {
        match self.salt {
            Some(_) => model.tokenizer.encode_uncached(text, add_special_tokens),
            None => model.tokenizer.encode(text, add_special_tokens),
        }
    }
}

impl Preparation<'_> {
    /// Runs work that takes milliseconds for long prompts, off the async threads unless it is
    /// small.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        is_small: bool,
        cost: Duration,
        work: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
    ) -> Result<T, RequestError> {
        let span = tracing::Span::current();
        let work = move || span.in_scope(work);
        self.pipeline.cpu.run_inline_if(is_small, self.cpu, cost, work).await?
    }

    /// Plans a conversation, for each class of workers with or without vLLM's own processor.
    ///
    /// The processor is needed for items that Chiasm can't plan for the class, or to render the
    /// conversation.
    async fn plan_conversation(
        self,
        chat: Chat,
        media: Vec<EncodedMedia>,
    ) -> Result<Vec<ClassPlan>, RequestError> {
        let Some(processors) = &self.pipeline.vllm_processors else {
            return self.plan(Prompt::Chat(chat), media).await;
        };
        let needs_processor = |(index, item): (usize, &EncodedMedia)| {
            self.videos.get(index).is_none() && self.pipeline.needs_vllm_processor(item)
        };
        if media.iter().enumerate().any(needs_processor)
            || processors.renders_conversations().await?
        {
            return self.plan_with_processors(processors, chat, media).await;
        }
        let Some(videos) = self.pipeline.videos.as_ref().filter(|_| !self.videos.is_empty()) else {
            return self.plan(Prompt::Chat(chat), media).await;
        };
        processors.know_releases(&self.classes).await;
        let (native, other): (Vec<_>, Vec<_>) =
            self.classes.iter().cloned().partition(|class| {
                videos.check_and_count(std::slice::from_ref(class), &self.videos)
            });
        if other.is_empty() {
            return self.plan(Prompt::Chat(chat), media).await;
        }
        let videos = PlannedVideos::default();
        let others = Self { classes: other.into(), videos, ..self.clone() };
        if native.is_empty() {
            return others.plan_with_processors(processors, chat, media).await;
        }
        let natives = Self { classes: native.into(), ..self };
        let prompt = Prompt::Chat(chat.clone());
        let (native, other) = tokio::join!(
            natives.plan(prompt, media.clone()),
            others.plan_with_processors(processors, chat, media),
        );
        either_plans(native, other)
    }

    /// Plans a prompt that needs no processor of vLLM.
    async fn plan(
        &self,
        prompt: Prompt,
        media: Vec<EncodedMedia>,
    ) -> Result<Vec<ClassPlan>, RequestError> {
        let model = self.pipeline.model.clone();
        let items = NativeItems {
            images: self.pipeline.images.clone(),
            videos: self.pipeline.videos.clone(),
            planned: self.videos.clone(),
        };
        let classes = self.classes.clone();
        let namespace = self.namespace.clone();
        let cpu = self.cpu.clone();
        let is_small = is_small(&prompt, &model);
        let cost = price_of(&prompt, &model, self.cpu);
        self.run(is_small, cost, move || match prompt {
            Prompt::Tokens(tokens) => plan_text(tokens, &classes, &namespace, &model),
            Prompt::Text(text) => {
                plan_text(namespace.encode(&model, &text, true)?, &classes, &namespace, &model)
            }
            Prompt::Chat(chat) => {
                plan_chat(&model, &items, chat, &media, &classes, &namespace, &cpu)
            }
        })
        .await
    }
}

/// Returns the plans for some classes and for others. A request that fails for some may succeed for
/// others.
fn either_plans(
    some: Result<Vec<ClassPlan>, RequestError>,
    others: Result<Vec<ClassPlan>, RequestError>,
) -> Result<Vec<ClassPlan>, RequestError> {
    match (some, others) {
        (Ok(some), Ok(others)) => Ok([some, others].concat()),
        (Ok(plans), Err(_)) | (Err(_), Ok(plans)) => Ok(plans),
        (Err(error), Err(_)) => Err(error),
    }
}

/// Plans a prompt without media items for each class.
fn plan_text(
    tokens: Vec<TokenId>,
    classes: &[PresentClass],
    namespace: &CacheNamespace,
    model: &ServedModel,
) -> Result<Vec<ClassPlan>, RequestError> {
    check_tokens(&tokens, model.last_token())?;
    let tokens = Arc::new(tokens);
    let plan = |class| ClassPlan::new(class, tokens.clone(), Vec::new(), namespace);
    retain_fitting(classes.iter().map(plan).collect(), classes)
}

/// Renders and tokenizes a conversation. Its messages may be large, so they are dropped as early as
/// possible.
pub(super) fn render(
    model: &ServedModel,
    chat: Chat,
    texts: &[MarkerText<'_>],
    namespace: &CacheNamespace,
) -> Result<Vec<TokenId>, RequestError> {
    Ok(namespace.encode(model, &render_text(model, chat, texts)?, false)?)
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

/// Renders and tokenizes a conversation, and expands its media items for each class.
fn plan_chat(
    model: &ServedModel,
    native: &NativeItems,
    mut chat: Chat,
    media: &[EncodedMedia],
    classes: &[PresentClass],
    namespace: &CacheNamespace,
    cpu: &CpuBudget,
) -> Result<Vec<ClassPlan>, RequestError> {
    if let Some((name, _)) = chat
        .media_kwargs
        .io
        .iter()
        .filter(|(name, _)| native.video_planner().is_none() || *name != Modality::Video.name())
        .find(|(_, kwargs)| kwargs.as_object().is_none_or(|kwargs| !kwargs.is_empty()))
    {
        let field = format!("media_io_kwargs.{name}");
        let message = format!("'{field}' is not supported for this model");
        return Err(RequestError::invalid(field, message));
    }
    let image_prompt = model.vision.as_ref().map(|vision| vision.prompt());
    let image_texts = image_prompt.as_ref().map(|prompt| [prompt.text]);
    let video_texts = native.video_planner().map(|videos| videos.marker_texts());
    let image_text = image_texts.as_ref().map(|texts| (&Modality::Image, &texts[..]));
    let video_text = video_texts.as_ref().map(|texts| (&Modality::Video, &texts[..]));
    let texts: Vec<MarkerText<'_>> = [image_text, video_text]
        .into_iter()
        .flatten()
        .map(|(modality, texts)| MarkerText { modality, texts })
        .collect();
    let sources = std::mem::take(&mut chat.media);
    let kwargs = Arc::new(*std::mem::take(&mut chat.media_kwargs));
    let rewrite = image_prompt.and_then(|prompt| prompt.rewrite);
    let text = render_text(model, chat, &texts)?;
    let rewritten = rewrite.map(|(from, to)| text.replace(from, to));
    let tokens = namespace.encode(model, rewritten.as_deref().unwrap_or(&text), false)?;
    let Some(vision) = &model.vision else { return plan_text(tokens, classes, namespace, model) };
    let needs_markers = |class: &PresentClass| class.class.placeholders == PlaceholderForm::Marker;
    let marked = if !classes.iter().any(needs_markers) {
        Arc::default()
    } else if rewrite.is_some() {
        // The rewritten text is only for our own expansion.
        Arc::new(namespace.encode(model, &text, false)?)
    } else {
        Arc::new(tokens.clone())
    };
    drop((text, rewritten));
    let ImagePrompt { marker, joins, .. } = vision.prompt();
    let image_marker = Marker { modality: &Modality::Image, tokens: marker };
    let video_marker = native
        .video_planner()
        .map(|videos| Marker { modality: &Modality::Video, tokens: videos.marker() });
    let markers: Vec<Marker<'_>> =
        [Some(image_marker), video_marker].into_iter().flatten().collect();
    let longest_context = classes.iter().map(|class| class.max_model_len).max().unwrap_or(0);
    let for_class = |class: &PresentClass| -> Result<ClassPlan, RequestError> {
        let items = native.plan(media, &sources, &kwargs, class, longest_context, cpu)?;
        let placed: Vec<_> =
            items.iter().map(|item| Item { modality: &item.modality, runs: &item.runs }).collect();
        let expanded = expand(&tokens, Markers { by_modality: &markers, joins }, &placed)?;
        check_tokens(&expanded.tokens, model.last_token())?;
        let placed = in_prompt_order(items, expanded.placeholders);
        let plan = ClassPlan::new(class, Arc::new(expanded.tokens), placed, namespace);
        let is_marked = needs_markers(class) && !plan.job_items.is_empty();
        Ok(ClassPlan { marked: is_marked.then(|| marked.clone()), ..plan })
    };
    retain_fitting(classes.iter().map(for_class).collect::<Result<_, _>>()?, classes)
}

/// Retains the plans of classes with a worker whose context leaves room for an answer.
///
/// # Errors
/// Returns [`Cause::ContextFull`] if no plan is left.
pub(super) fn retain_fitting(
    mut plans: Vec<ClassPlan>,
    classes: &[PresentClass],
) -> Result<Vec<ClassPlan>, RequestError> {
    let context = |plan: &ClassPlan| {
        classes.iter().find(|class| class.id == plan.class).map_or(0, |class| class.max_model_len)
    };
    let largest = plans.iter().map(|plan| (context(plan), plan.tokens.len())).max();
    plans.retain(|plan| plan.tokens.len() < context(plan));
    match (plans.is_empty(), largest) {
        (true, Some((max_model_len, tokens))) => {
            Err(Cause::ContextFull { tokens, max_model_len }.into())
        }
        _ => Ok(plans),
    }
}

/// Pairs items with their placeholders, in the order of the prompt.
pub(super) fn in_prompt_order(
    items: Vec<ItemPlan>,
    placeholders: Vec<Placeholder>,
) -> Vec<(ItemPlan, Placeholder)> {
    let mut placed: Vec<_> = items.into_iter().zip(placeholders).collect();
    placed.sort_by_key(|(_, placeholder)| placeholder.offset);
    placed
}

impl ClassPlan {
    /// Creates the plan of an expanded prompt and its items, and computes its block keys.
    pub(super) fn new(
        class: &PresentClass,
        tokens: Arc<Vec<TokenId>>,
        items: Vec<(ItemPlan, Placeholder)>,
        namespace: &CacheNamespace,
    ) -> Self {
        let media: Vec<MediaSpan> = items
            .iter()
            .flat_map(|(item, placeholder)| spans(&class.class, item.hash, placeholder))
            .collect();
        let lora = namespace.adapter.as_ref().map(|adapter| adapter.engine().name.as_str());
        let salt = namespace.salt.as_deref();
        let blocks = PromptBlocks { tokens: &tokens, media: &media, lora, salt };
        let keys = keys_for(&class.class, &blocks);
        Self {
            class: class.id,
            encoder_tokens: items.iter().map(|(item, _)| item.encoder_tokens).max().unwrap_or(0),
            route_items: items
                .iter()
                .map(|(item, placeholder)| item.to_route(placeholder))
                .collect(),
            job_items: items
                .into_iter()
                .map(|(item, placeholder)| item.into_job(placeholder))
                .collect(),
            tokens,
            marked: None,
            keys,
        }
    }

    /// Returns the prompt in the form for workers of the class.
    pub(super) fn input(&self) -> Input {
        match &self.marked {
            Some(marked) => Input::Marked { tokens: marked.clone(), expanded: self.tokens.clone() },
            None => Input::Tokens(self.tokens.clone()),
        }
    }
}

/// Checks that a prompt is not empty and has no token above `last`, which would make an engine fail
/// for all its requests.
///
/// # Errors
/// Returns [`Cause::Invalid`] otherwise.
pub(super) fn check_tokens(tokens: &[TokenId], last: TokenId) -> Result<(), RequestError> {
    match tokens.iter().copied().max() {
        None => Err(Cause::Invalid("the prompt is empty".to_owned()).into()),
        Some(token) if token > last => {
            Err(Cause::Invalid(sampling::outside_vocabulary(token, last)).into())
        }
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests;
