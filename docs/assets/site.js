// Names, for those who listen to the page, of what the theme leaves without one; and tables that scroll can be reached
// with the keyboard. The theme makes some of these after the page has loaded.
const names = [[".md-search[role=dialog]", "Search"], [".md-code__nav", "Code"], [".md-typeset__scrollwrap", "Table"]];
function label() {
  for (const [selector, name] of names)
    document.querySelectorAll(`${selector}:not([aria-label])`).forEach((element, number) => {
      element.setAttribute("aria-label", name === "Search" ? name : `${name} ${number + 1}`);
      if (name === "Table") { element.setAttribute("role", "region"); element.tabIndex = 0; }
    });
}
label();
new MutationObserver(label).observe(document.body, {childList: true, subtree: true});
