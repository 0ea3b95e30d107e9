//! Detects the format of `content` that a chat template expects, by vLLM's rule.
//!
//! A template that loops over a message's content expects a list of parts, any other template a
//! string. The analysis of the syntax tree follows `_detect_content_format` of
//! `vllm/renderers/hf.py` (0.33.0), including its oddities: the same conversation must become the
//! same tokens. If vLLM's analysis gives up, the format is a string.

use std::collections::HashSet;

use minijinja::machinery::ast::{CallArg, Expr, ForLoop, Macro, Spanned, Stmt};

use super::environment;

/// The format in which a message's `content` is passed to a chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    /// A string with placeholder texts for images. vLLM calls it `string`.
    String,
    /// A list of `{"type": "text", "text": …}` and `{"type": "image"}`. vLLM calls it `openai`.
    Parts,
}

/// Detects the format for a prepared template source.
pub(super) fn detect(source: &str) -> ContentFormat {
    let loops_over_content = environment::parse(source).ok().and_then(|root| {
        let mut tree = Tree::default();
        tree.statement(&root, &[]);
        tree.loops_over_content()
    });
    if loops_over_content == Some(true) { ContentFormat::Parts } else { ContentFormat::String }
}

/// The nodes of a template that the rule examines, in the order of the source.
#[derive(Default)]
struct Tree<'t, 's> {
    /// Loops, each with the macros around it.
    loops: Vec<(&'t ForLoop<'s>, Vec<&'t Macro<'s>>)>,
    /// Targets and values.
    assignments: Vec<(&'t Expr<'s>, &'t Expr<'s>)>,
    /// Callees and arguments.
    calls: Vec<(&'t Expr<'s>, &'t [CallArg<'s>])>,
}

impl<'t, 's> Tree<'t, 's> {
    /// Returns `true` if a loop iterates over a message's content. Returns `None` if vLLM's
    /// analysis gives up, at a loop that unpacks.
    fn loops_over_content(&self) -> Option<bool> {
        let messages = self.message_names()?;
        let is_content =
            |expr: &Expr<'_>| messages.iter().any(|name| is_attribute(expr, name, "content"));
        for (for_loop, enclosing) in &self.loops {
            let over_content = is_content(&for_loop.iter)
                || variable(&for_loop.iter).is_some_and(|name| {
                    enclosing
                        .iter()
                        .any(|decl| self.content_parameters(decl, &is_content).contains(name))
                        || (enclosing.is_empty() && name == "content")
                });
            if over_content {
                return variable(&for_loop.target).map(|_| true);
            }
        }
        Some(false)
    }

    /// Returns the names of messages: the targets of loops over `messages`, and over variables and
    /// attributes derived from it.
    fn message_names(&self) -> Option<Vec<&'s str>> {
        let mut lists = vec!["messages".to_owned()];
        let mut next = 0;
        while let Some(list) = lists.get(next).cloned() {
            next += 1;
            for (target, value) in &self.assignments {
                let names = match namespace_arguments(value) {
                    Some(arguments) => attributes_from_list(&list, target, arguments),
                    None if is_path(value, &list) => path(target).into_iter().collect(),
                    None => Vec::new(),
                };
                lists.extend(
                    names.into_iter().filter(|name| !lists.contains(name)).collect::<Vec<_>>(),
                );
            }
        }
        self.loops
            .iter()
            .filter(|(for_loop, _)| lists.iter().any(|list| is_path(&for_loop.iter, list)))
            .map(|(for_loop, _)| variable(&for_loop.target))
            .collect()
    }

    /// Returns the parameters of a macro to which some call passes a message's content.
    fn content_parameters(
        &self,
        decl: &Macro<'s>,
        is_content: &dyn Fn(&Expr<'_>) -> bool,
    ) -> HashSet<&'s str> {
        let parameters: Vec<&'s str> = decl.args.iter().filter_map(variable).collect();
        let mut found = HashSet::new();
        for (_, arguments) in
            self.calls.iter().filter(|(callee, _)| variable(callee) == Some(decl.name))
        {
            let mut position = 0;
            for argument in *arguments {
                let (name, value) = match argument {
                    CallArg::Pos(value) => {
                        position += 1;
                        (parameters.get(position - 1).copied(), value)
                    }
                    CallArg::Kwarg(name, value) => {
                        (parameters.contains(name).then_some(*name), value)
                    }
                    CallArg::PosSplat(_) | CallArg::KwargSplat(_) => continue,
                };
                found.extend(name.filter(|_| is_content(value)));
            }
        }
        found
    }

    fn statements(&mut self, statements: &'t [Stmt<'s>], enclosing: &[&'t Macro<'s>]) {
        statements.iter().for_each(|statement| self.statement(statement, enclosing));
    }

    fn statement(&mut self, statement: &'t Stmt<'s>, enclosing: &[&'t Macro<'s>]) {
        match statement {
            Stmt::Template(node) => self.statements(&node.children, enclosing),
            Stmt::EmitExpr(node) => self.expression(&node.expr),
            Stmt::ForLoop(node) => {
                self.loops.push((node, enclosing.to_vec()));
                self.expression(&node.iter);
                self.expressions(&node.filter_expr);
                self.statements(&node.body, enclosing);
                self.statements(&node.else_body, enclosing);
            }
            Stmt::IfCond(node) => {
                self.expression(&node.expr);
                self.statements(&node.true_body, enclosing);
                self.statements(&node.false_body, enclosing);
            }
            Stmt::WithBlock(node) => {
                node.assignments.iter().for_each(|(_, value)| self.expression(value));
                self.statements(&node.body, enclosing);
            }
            Stmt::Set(node) => {
                self.assignments.push((&node.target, &node.expr));
                self.expression(&node.expr);
            }
            Stmt::SetBlock(node) => {
                self.expressions(&node.filter);
                self.statements(&node.body, enclosing);
            }
            Stmt::AutoEscape(node) => self.statements(&node.body, enclosing),
            Stmt::FilterBlock(node) => {
                self.expression(&node.filter);
                self.statements(&node.body, enclosing);
            }
            Stmt::Block(node) => self.statements(&node.body, enclosing),
            Stmt::Macro(node) => self.macro_declaration(node, enclosing),
            Stmt::CallBlock(node) => {
                self.calls.push((&node.call.expr, &node.call.args));
                self.arguments(&node.call.args);
                self.statements(&node.macro_decl.body, enclosing);
            }
            Stmt::Do(node) => {
                self.calls.push((&node.call.expr, &node.call.args));
                self.arguments(&node.call.args);
            }
            Stmt::EmitRaw(_)
            | Stmt::Import(_)
            | Stmt::FromImport(_)
            | Stmt::Extends(_)
            | Stmt::Include(_)
            | Stmt::Continue(_)
            | Stmt::Break(_) => {}
        }
    }

    fn macro_declaration(&mut self, node: &'t Spanned<Macro<'s>>, enclosing: &[&'t Macro<'s>]) {
        self.expressions(&node.defaults);
        let inner: Vec<&'t Macro<'s>> = enclosing.iter().copied().chain([&**node]).collect();
        self.statements(&node.body, &inner);
    }

    fn expressions(&mut self, expressions: impl IntoIterator<Item = &'t Expr<'s>>)
    where
        's: 't,
    {
        expressions.into_iter().for_each(|expression| self.expression(expression));
    }

    fn arguments(&mut self, arguments: &'t [CallArg<'s>]) {
        for argument in arguments {
            match argument {
                CallArg::Pos(value)
                | CallArg::Kwarg(_, value)
                | CallArg::PosSplat(value)
                | CallArg::KwargSplat(value) => self.expression(value),
            }
        }
    }

    /// Visits an expression. Calls may be nested anywhere in it.
    fn expression(&mut self, expression: &'t Expr<'s>) {
        match expression {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(node) => {
                self.expression(&node.expr);
                self.expressions([&node.start, &node.stop, &node.step].into_iter().flatten());
            }
            Expr::UnaryOp(node) => self.expression(&node.expr),
            Expr::BinOp(node) => self.expressions([&node.left, &node.right]),
            Expr::Compare(node) => {
                self.expression(&node.expr);
                self.expressions(node.ops.iter().map(|operand| &operand.expr));
            }
            Expr::IfExpr(node) => {
                self.expressions([&node.test_expr, &node.true_expr]);
                self.expressions(&node.false_expr);
            }
            Expr::Filter(node) => {
                self.expressions(&node.expr);
                self.arguments(&node.args);
            }
            Expr::Test(node) => {
                self.expression(&node.expr);
                self.arguments(&node.args);
            }
            Expr::GetAttr(node) => self.expression(&node.expr),
            Expr::GetItem(node) => self.expressions([&node.expr, &node.subscript_expr]),
            Expr::Call(node) => {
                self.calls.push((&node.expr, &node.args));
                self.expression(&node.expr);
                self.arguments(&node.args);
            }
            Expr::List(node) => self.expressions(&node.items),
            Expr::Tuple(node) => self.expressions(&node.items),
            Expr::Map(node) => {
                self.expressions(&node.keys);
                self.expressions(&node.values);
            }
        }
    }
}

/// Returns the name of a variable; `None` for any other expression.
fn variable<'s>(expr: &Expr<'s>) -> Option<&'s str> {
    match expr {
        Expr::Var(node) => Some(node.id),
        _ => None,
    }
}

/// Returns the expression inside filters, tests and slices, which keep a list a list.
fn strip_filters<'t, 's>(expr: &'t Expr<'s>) -> Option<&'t Expr<'s>> {
    match expr {
        Expr::Filter(node) => node.expr.as_ref().and_then(strip_filters),
        Expr::Test(node) => strip_filters(&node.expr),
        Expr::Slice(node) => strip_filters(&node.expr),
        _ => Some(expr),
    }
}

/// Returns the source form of `name`, `name.attribute` and so on; `None` for other expressions.
fn path(expr: &Expr<'_>) -> Option<String> {
    match expr {
        Expr::Var(node) => Some(node.id.to_owned()),
        Expr::GetAttr(node) => Some(format!("{}.{}", path(&node.expr)?, node.name)),
        _ => None,
    }
}

/// Returns `true` if the expression is `name` below filters, tests and slices.
fn is_path(expr: &Expr<'_>, name: &str) -> bool {
    strip_filters(expr).and_then(path).is_some_and(|found| found == name)
}

/// Returns the arguments of a call of `namespace`; `None` for other expressions.
fn namespace_arguments<'t, 's>(expr: &'t Expr<'s>) -> Option<&'t [CallArg<'s>]> {
    match expr {
        Expr::Call(node) if variable(&node.expr) == Some("namespace") => Some(&node.args),
        _ => None,
    }
}

/// Returns the attributes of a new namespace whose value is `list`.
fn attributes_from_list(
    list: &str,
    namespace: &Expr<'_>,
    arguments: &[CallArg<'_>],
) -> Vec<String> {
    let attribute = |argument: &CallArg<'_>| match argument {
        CallArg::Kwarg(name, value) if is_path(value, list) => {
            Some(format!("{}.{name}", variable(namespace)?))
        }
        _ => None,
    };
    arguments.iter().filter_map(attribute).collect()
}

/// Returns `true` if the expression is `name.key` or `name['key']`.
fn is_attribute(expr: &Expr<'_>, name: &str, key: &str) -> bool {
    match strip_filters(expr) {
        Some(Expr::GetAttr(node)) => variable(&node.expr) == Some(name) && node.name == key,
        Some(Expr::GetItem(node)) => {
            let Expr::Const(constant) = &node.subscript_expr else { return false };
            variable(&node.expr) == Some(name) && constant.value.as_str() == Some(key)
        }
        _ => false,
    }
}
