use std::net::Ipv4Addr;

use chiasm_limit::Owner;
use chiasm_prompt::{ChatContent, ChatMessage};

use super::*;
use crate::test_support::TestPipeline;

fn conversation(text: String) -> Prompt {
    let message = ChatMessage {
        role: "user".to_owned(),
        content: Some(ChatContent::Text(text)),
        ..ChatMessage::default()
    };
    Prompt::Chat(Chat { messages: vec![message], add_generation_prompt: true, ..Chat::default() })
}

#[tokio::test]
async fn invalid_prompt_is_refused_at_its_field() {
    let test = TestPipeline::new(1).await;
    let context = test.pipeline.fleet.classes()[0].max_model_len;
    let long = "word ".repeat(2 * context);
    for (prompt, field) in [
        (Prompt::Text(long.clone()), "prompt"),
        (Prompt::Tokens(vec![TokenId(1); context]), "prompt"),
        (Prompt::Tokens(Vec::new()), "prompt"),
        (Prompt::Tokens(vec![TokenId(1), TokenId(u32::MAX)]), "prompt"),
        (conversation(long), "messages"),
    ] {
        let error = test.prepare(prompt, ClientSampling::default()).await.unwrap_err();
        assert_eq!(error.field.as_deref(), Some(field), "{error}");
        assert!(matches!(error.cause, Cause::ContextFull { .. } | Cause::Invalid(_)), "{error}");
    }
}

#[tokio::test]
async fn rendering_json_costs_as_much_as_parsing() {
    let test = TestPipeline::new(1).await;
    let cpu =
        CpuBudget::new(Owner::from_address(Ipv4Addr::LOCALHOST.into()), Duration::from_secs(10));
    let parsing = cpu.ticket(Duration::from_secs(1)).map(|_| cpu.spent()).unwrap();
    let mut prompt = conversation("hello".to_owned());
    let price = |prompt: &Prompt| price_of(prompt, &test.pipeline.model, &cpu);
    let plain = price(&prompt);
    let Prompt::Chat(chat) = &mut prompt else { unreachable!("a conversation") };
    chat.messages[0].tool_calls = Some(serde_json::json!([]));
    assert_eq!(price(&prompt), plain + parsing);
}

#[tokio::test]
async fn stale_plan_without_kept_inputs_fails_request() {
    let test = TestPipeline::new(1).await;
    let mut text = test.text(ClientSampling::default()).await;
    let stale = RequestError::stale_plan("the video has no frames");
    let error = text.plan_again(&test.pipeline, stale).await.unwrap_err();
    assert!(error.is_stale_plan(), "{error}");
    assert_eq!(test.pipeline.metrics.replanned(), 0);
}
