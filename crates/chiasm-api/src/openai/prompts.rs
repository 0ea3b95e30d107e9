//! `prompt` of a completion request: text, token ids, or a list of either.

use std::fmt;

use chiasm_request::Prompt;
use chiasm_types::TokenId;
use serde::de::{Error, IgnoredAny, SeqAccess, Visitor};

use super::intake::{Intake, Seed};
use super::request::LargeField;
use crate::error::ApiError;

/// The maximum number of prompts in one body.
const MAX_PROMPTS: usize = 128;

/// The accepted forms of `prompt`, for errors.
const FORMS: &str = "a string, a list of strings, a list of token ids or a list of those";

/// The prompts of a request; at least one.
pub(super) struct Prompts(pub(super) Vec<Prompt>);

impl LargeField for Prompts {
    const NAME: &'static str = "prompt";
}

/// A list of token ids, which may be empty.
pub(super) struct Tokens(pub(super) Vec<TokenId>);

impl LargeField for Tokens {
    const NAME: &'static str = "tokens";
}

impl<'de> Visitor<'de> for Seed<'_, Option<Tokens>> {
    type Value = Option<Tokens>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of token ids")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
        read_tokens(self.intake, seq).map(|tokens| Some(Tokens(tokens)))
    }
}

/// An element of a list of prompts or of token ids.
enum Element {
    Token(TokenId),
    Prompt(Prompt),
}

impl<'de> Visitor<'de> for Seed<'_, Option<Prompts>> {
    type Value = Option<Prompts>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(FORMS)
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        self.intake.copy_prompt(text).map(|text| Some(Prompts(vec![Prompt::Text(text)])))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let intake = self.intake;
        let mut tokens = Vec::new();
        let mut prompts = Vec::new();
        while let Some(element) = seq.next_element_seed(intake.seed::<Element>())? {
            match element {
                Element::Token(token) if prompts.is_empty() => intake.push(&mut tokens, token)?,
                Element::Prompt(prompt)
                    if tokens.is_empty()
                        && prompts.first().is_none_or(|first| are_alike(first, &prompt)) =>
                {
                    prompts.push(prompt);
                }
                _ => {
                    return Err(intake
                        .refuse(ApiError::invalid("prompt", format!("'prompt' must be {FORMS}"))));
                }
            }
            if prompts.len() > MAX_PROMPTS {
                break;
            }
        }
        if !tokens.is_empty() {
            prompts.push(Prompt::Tokens(tokens));
        }
        if prompts.is_empty() || prompts.len() > MAX_PROMPTS {
            let mut count = prompts.len();
            while seq.next_element::<IgnoredAny>()?.is_some() {
                count += 1;
            }
            let message = format!("'prompt' must have 1 to {MAX_PROMPTS} prompts, got {count}");
            return Err(intake.refuse(ApiError::invalid("prompt", message)));
        }
        Ok(Some(Prompts(prompts)))
    }
}

impl<'de> Visitor<'de> for Seed<'_, Element> {
    type Value = Element;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(FORMS)
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<Element, E> {
        to_token_id(id).map(Element::Token)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Element, E> {
        self.intake.copy_prompt(text).map(|text| Element::Prompt(Prompt::Text(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Element, A::Error> {
        read_tokens(self.intake, seq).map(|tokens| Element::Prompt(Prompt::Tokens(tokens)))
    }
}

fn read_tokens<'de, A: SeqAccess<'de>>(
    intake: &mut Intake,
    mut seq: A,
) -> Result<Vec<TokenId>, A::Error> {
    let mut tokens = Vec::new();
    while let Some(id) = seq.next_element()? {
        intake.push(&mut tokens, to_token_id(id)?)?;
    }
    Ok(tokens)
}

/// Returns `true` if both prompts are texts, or both are token ids.
fn are_alike(first: &Prompt, second: &Prompt) -> bool {
    std::mem::discriminant(first) == std::mem::discriminant(second)
}

fn to_token_id<E: Error>(id: u64) -> Result<TokenId, E> {
    u32::try_from(id).map(TokenId).map_err(|_| E::custom(format!("{id} is not a token id")))
}
