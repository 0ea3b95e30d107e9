//! The bodies of `POST /tokenize` and `POST /detokenize`, in vLLM's format.

use chiasm_media::Charge;
use chiasm_prompt::Tokenizer;
use chiasm_request::Tokenizable;
use chiasm_types::TokenId;
use serde::Serialize;

use super::body::TokenIds;
use super::chat;
use super::fields::Fields;
use super::intake::Intake;
use super::messages::Messages;
use super::prompts::Tokens;
use super::request::{self, RequestBody};
use super::tools;
use crate::error::ApiError;

/// A request to tokenize a prompt: the text `prompt`, or `messages` with the other fields of a chat
/// completion.
pub struct TokenizeRequest {
    /// The model's name, if given.
    pub model: Option<String>,
    /// The prompt.
    pub prompt: Tokenizable,
    /// `true` if the answer includes the vocabulary's names of the tokens.
    pub return_token_strs: bool,
}

impl RequestBody for TokenizeRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let (mut fields, messages) = request::read_optional::<Messages>(&mut intake)?;
        let model = fields.take("model")?;
        let return_token_strs = fields.take("return_token_strs")?.unwrap_or(false);
        let prompt = match messages {
            Some(messages) => {
                let tools = tools::take(&mut fields)?;
                Tokenizable::Chat(chat::take_chat(&mut fields, messages, tools.as_ref())?)
            }
            None => take_text(&mut intake, &mut fields)?,
        };
        fields.finish()?;
        Ok((Self { model, prompt, return_token_strs }, intake.into_charge()))
    }
}

fn take_text(intake: &mut Intake, fields: &mut Fields) -> Result<Tokenizable, ApiError> {
    let text: String = fields.take("prompt")?.ok_or_else(|| ApiError::missing("prompt"))?;
    intake.plan_text("prompt", &text)?;
    Ok(Tokenizable::Text {
        text,
        add_special_tokens: fields.take("add_special_tokens")?.unwrap_or(true),
    })
}

/// The answer with the tokens of a prompt.
#[derive(Serialize)]
pub struct TokenizeAnswer<'a> {
    count: usize,
    max_model_len: usize,
    tokens: TokenIds<'a>,
    /// The tokens as the vocabulary writes them; null unless requested.
    token_strs: Option<Vec<String>>,
}

impl<'a> TokenizeAnswer<'a> {
    /// Creates the answer. `max_model_len` is the context that a prompt shares with its answer. The
    /// answer includes the vocabulary's names of the tokens if `tokenizer` is given.
    pub fn new(tokens: &'a [TokenId], max_model_len: usize, tokenizer: Option<&Tokenizer>) -> Self {
        let name = |tokenizer: &Tokenizer, token: &TokenId| {
            tokenizer.id_to_token(*token).unwrap_or_default()
        };
        let token_strs =
            tokenizer.map(|tokenizer| tokens.iter().map(|token| name(tokenizer, token)).collect());
        Self { count: tokens.len(), max_model_len, tokens: TokenIds(tokens), token_strs }
    }
}

/// A request for the text of tokens.
pub struct DetokenizeRequest {
    /// The model's name, if given.
    pub model: Option<String>,
    /// The tokens.
    pub tokens: Vec<TokenId>,
}

impl RequestBody for DetokenizeRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let (mut fields, Tokens(tokens)) = request::read(&mut intake)?;
        let model = fields.take("model")?;
        fields.finish()?;
        Ok((Self { model, tokens }, intake.into_charge()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn tokenize(body: Value) -> Result<TokenizeRequest, ApiError> {
        TokenizeRequest::parse(Intake::from_json(&body)).map(|(request, _)| request)
    }

    fn refused(body: Value) -> Option<String> {
        tokenize(body).err().and_then(|error| error.param)
    }

    #[test]
    fn prompt_is_text_or_conversation() {
        let text = tokenize(json!({"prompt": "a", "return_token_strs": true})).unwrap();
        assert!(text.return_token_strs);
        assert!(matches!(text.prompt, Tokenizable::Text { add_special_tokens: true, .. }));
        let plain = tokenize(json!({"prompt": "a", "add_special_tokens": false, "messages": null}))
            .unwrap();
        assert!(matches!(plain.prompt, Tokenizable::Text { add_special_tokens: false, .. }));
        let messages = json!([{"role": "user", "content": "a"}]);
        let chat =
            tokenize(json!({"messages": messages, "tools": [], "add_generation_prompt": false}))
                .unwrap();
        assert!(matches!(chat.prompt, Tokenizable::Chat(chat) if !chat.add_generation_prompt));
        for (body, param) in [
            (json!({}), "prompt"),
            (json!({"prompt": [1]}), "prompt"),
            (json!({"prompt": "a", "messages": messages}), "prompt"),
            (json!({"prompt": "a", "tools": []}), "tools"),
            (json!({"messages": messages, "add_special_tokens": true}), "add_special_tokens"),
            (
                json!({"messages": messages, "continue_final_message": true}),
                "continue_final_message",
            ),
        ] {
            assert_eq!(refused(body.clone()).as_deref(), Some(param), "{body}");
        }
    }

    #[test]
    fn tokens_must_be_32_bit_numbers() {
        let parse =
            |tokens: Value| DetokenizeRequest::parse(Intake::from_json(&json!({"tokens": tokens})));
        let tokens = |tokens: Value| parse(tokens).map(|(request, _)| request.tokens);
        assert_eq!(tokens(json!([1, 2])).unwrap(), [TokenId(1), TokenId(2)]);
        assert_eq!(tokens(json!([])).unwrap(), []);
        for wrong in
            [json!(null), json!("a"), json!([-1]), json!([1_u64 << 32]), json!([[1]]), json!([1.5])]
        {
            assert_eq!(
                tokens(wrong.clone()).unwrap_err().param.as_deref(),
                Some("tokens"),
                "{wrong}"
            );
        }
    }
}
