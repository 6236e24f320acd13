// Elements without markup: text goes in as text, so nothing that a worker sends is ever parsed.

/**
 * Makes an element. Attributes: `class`, `on` (listeners by event), `data` (data-...), and any other
 * by its name; null and false are left out. Children are elements or text.
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "data") {
      Object.assign(element.dataset, value);
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
  }
}

/** The element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Sets an element's text, and touches the page only if it differs. */
export function say(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Sets or (null, false) removes an attribute, and touches the page only if it differs. */
export function mark(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, String(value));
  }
}

/** Replaces all children. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/**
 * Keeps one child for each item, in order. Elements stay while their key stays, so that focus and
 * a reader's place survive.
 */
export function keep(parent, items, keyOf, create, update) {
  const there = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let before = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    const element = there.get(key) ?? create(item);
    there.delete(key);
    element.dataset.key = key;
    update(element, item);
    if (element === before) before = before.nextElementSibling;
    else parent.insertBefore(element, before);
  }
  for (const gone of there.values()) gone.remove();
}
