// A page that is opened as a file may not start a worker, which the search runs in: there a frame takes the worker's place.
// Nor may it read the list of versions, so that it knows its own alone, by its folder.
if (location.protocol === "file:") {
  const open = XMLHttpRequest.prototype.open
  XMLHttpRequest.prototype.open = function (method, url) {
    const version = document.baseURI.match(/\/(\d+\.\d+\.[^/]+)\//)?.[1]
    const list = JSON.stringify([{ version, title: version, aliases: ["latest"] }])
    open.call(this, method, url.endsWith("/versions.json") ? `data:application/json,${encodeURIComponent(list)}` : url)
  }
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.ready = new Promise((resolve) => {
        const inside = frame.contentWindow
        // What the worker says goes to the page, and not to itself.
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
        const loaded = frame.contentDocument.createElement("script")
        loaded.src = script
        loaded.onload = () => resolve(inside)
        frame.contentDocument.body.append(loaded)
      })
    }
    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
